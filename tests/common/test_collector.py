"""Pausing the garbage collector."""

import gc

import pytest

from jaxllm.common.collector import paused_collector


def test_the_collector_is_as_before_after_the_context():
    with pytest.raises(ValueError), paused_collector():  # noqa: PT011, PT012
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
