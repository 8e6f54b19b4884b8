"""The rules on lengths: rows of the batch engine against a padded batch of `generate`.

In a padded batch `min_length` and `max_length` count the pads on the left of a prompt, as in
transformers. In the batch engine a row counts its own tokens only.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tiny
from generation_tools import padded, turns

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.rows import BatchOutput

EOS, FORCED_BOS = 2, 7
NEW, WIDTH = 10, 9
PROMPTS = turns(3, WIDTH, 4, 2)
SMALL = {"llama": {"num_hidden_layers": 1}, "t5": {"num_layers": 1, "num_decoder_layers": 1}}
NEVER = 1000

# All rows have the same processors, so that all rules share the compiled programs.
PLAIN = {
    "eos_token_id": EOS,
    "logit_bias": {EOS: -8.0},
    "max_new_tokens": NEW,
    "min_new_tokens": 1,
    "exponential_decay_length_penalty": (NEVER, 1.0),
    "forced_eos_token_id": EOS,
    "forced_bos_token_id": FORCED_BOS,  # has no effect after a prompt of several tokens
}
LIKELY_END = {"logit_bias": {EOS: 50.0}}
"""A row with this ends as soon as it may."""


@functools.cache
def model(family: str) -> Any:
    return tiny.make(family, **SMALL[family])


def prompts(family: str, rule: str) -> list[list[int]]:
    """A decoder's first token is forced after a prompt of one token only."""
    return [[5], [6], [8]] if (family, rule) == ("llama", "forced ends") else PROMPTS


def rules(start: int) -> dict[str, dict[str, Any]]:
    """Settings of one rule each, for a decoder prompt of `start` columns; None: not set."""
    return {
        "min_new_tokens": {"min_new_tokens": 4, **LIKELY_END},
        "min_length": {"min_new_tokens": None, "min_length": start + 4, **LIKELY_END},
        "max_length": {"max_new_tokens": None, "max_length": start + 6},
        "decay": {"exponential_decay_length_penalty": (3, 2.0)},
        "forced ends": {},
    }


RULES = tuple(rules(0))


def fields(start: int, rule: str) -> dict[str, Any]:
    merged = PLAIN | rules(start)[rule]
    return {name: value for name, value in merged.items() if value is not None}


@functools.cache
def outputs(family: str) -> dict[str, list[BatchOutput]]:
    """The outputs of each rule's rows, all from one run of the engine."""
    rows = [
        {"input_ids": prompt, **fields(1 if family == "t5" else len(prompt), rule)}
        for rule in RULES
        for prompt in prompts(family, rule)
    ]
    engine = BatchGenerator(model(family), slots=4)
    found = iter(engine.generate(rows))
    return {rule: [next(found) for _ in prompts(family, rule)] for rule in RULES}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", SMALL)
def test_rows_are_those_of_a_padded_batch(family: str, rule: str) -> None:
    net = model(family)
    ids, mask = padded(prompts(family, rule))
    start = 1 if net.is_encoder_decoder else ids.shape[1]
    sequences = jaxllm.generate(net, ids, mask, **fields(start, rule)).sequences
    for output, new in zip(outputs(family)[rule], np.asarray(sequences)[:, start:], strict=True):
        assert output.error is None
        (tokens,), (reason,) = output.output_ids, output.finish_reasons
        assert tokens == new[: len(tokens)].tolist()
        assert set(new[len(tokens) :].tolist()) <= {EOS}  # pads
        if rule in ("min_new_tokens", "min_length"):
            assert (len(tokens), tokens[-1], reason) == (5, EOS, "eos")
        elif rule == "decay":
            assert 3 < len(tokens) < NEW
            assert (tokens[-1], reason) == (EOS, "eos")
        else:
            length = 6 if rule == "max_length" else NEW
            assert (len(tokens), tokens[-1], reason) == (length, EOS, "length")
        if family == "t5" or rule == "forced ends":
            assert tokens[0] == FORCED_BOS
