"""Freezing parts of a model in an optax loop of one's own, with the model as the tree."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiny

from jaxllm.common.errors import InputError
from jaxllm.models.weights import parameters
from jaxllm.training import CausalLoss, labels


@pytest.mark.ci
def test_a_loop_of_one_s_own_freezes_what_it_labels():
    model, ids = tiny.make("llama"), tiny.ids()
    batch = {"input_ids": ids, "labels": ids}
    label = labels(model, {r"blocks\.1\.": "train"}, default="freeze")
    decayed = labels(model, {"norm": False}, default=True)
    optimizer = optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), decayed),
        optax.multi_transform({"train": optax.adam(0.01), "freeze": optax.set_to_zero()}, label),
    )

    @jax.jit
    def step(model: Any, state: Any) -> tuple[Any, Any]:
        gradients = jax.grad(lambda model: CausalLoss()(model, batch).loss)(model)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state

    after = parameters(step(model, optimizer.init(model))[0])
    for path, x in parameters(model).items():
        assert np.array_equal(x, after[path]) == ("blocks.1." not in path), path


def test_patterns_that_fit_nothing():
    model = tiny.make("llama")
    with pytest.raises(InputError, match="labels: 'decoder' matches no parameter, such as"):
        labels(model, {"decoder": 1}, default=0)
    with pytest.raises(InputError, match=re.escape("labels: no pattern matches backbone")):
        labels(model, {"lm_head": "train"})
