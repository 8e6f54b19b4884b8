"""What results depend on besides files and options, as jobs and runs record it."""

from __future__ import annotations

import importlib.metadata

from jaxllm.parallel.environment import changed_environment, versions


def test_packages_kernels_and_flags_are_named(monkeypatch):
    """Tokenizers decide the ids, kernels and flags the rounding."""
    kernels = {d.name for d in importlib.metadata.distributions()} & {"jaxllm-cpu-kernels"}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAXLLM_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    before = versions()
    assert {"python", "jax", "tokenizers", "sentencepiece", *kernels} <= before.keys()
    assert changed_environment(before, versions()) is None
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "0")
    assert before.keys() - versions().keys() == kernels
    monkeypatch.delenv("JAXLLM_CPU_KERNELS")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    remark = changed_environment(before, versions())
    assert remark is not None
    assert '(XLA_FLAGS: was null, is "--xla_cpu_enable_fast_math=true")' in remark
