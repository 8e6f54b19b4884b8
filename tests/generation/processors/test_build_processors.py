"""From settings to processors: order, presence, checks, and stable programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.common.errors import InputError
from jaxllm.generation import processors as P
from jaxllm.generation.processors.build import ProcessorInputs, build_processors
from jaxllm.generation.settings.config import GenerationConfig

PROMPT = np.array([[0, 5, 6], [4, 5, 6]], np.int32)
MASK = np.array([[False, True, True], [True, True, True]])


def build(config, extra=(), **changes):
    inputs = ProcessorInputs(config, 3, 10, (1,), 23, PROMPT, MASK)
    return build_processors(dataclasses.replace(inputs, **changes), extra=extra)


def names(processors) -> list[str]:
    short = [type(p).__name__ for p in processors]
    return [n.replace("LogitsProcessor", "").replace("LogitsWarper", "") for n in short]


EVERYTHING = {
    "sequence_bias": {(1, 2): 1.0},
    "encoder_repetition_penalty": 1.5,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "min_length": 4,
    "forced_bos_token_id": 2,
    "forced_eos_token_id": 1,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.1),
    "suppress_tokens": [4],
    "begin_suppress_tokens": [5],
    "do_sample": True,
    "temperature": 0.5,
    "top_h": 0.9,
    "top_k": 10,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "renormalize_logits": True,
}
ORDER = [
    *("SequenceBias", "EncoderRepetitionPenalty", "RepetitionPenalty", "NoRepeatNGram"),
    *("EncoderNoRepeatNGram", "NoBadWords", "MinLength", "ForcedBOSToken", "ForcedEOSToken"),
    *("InfNanRemove", "ExponentialDecayLengthPenalty", "SuppressTokens", "SuppressTokensAtBegin"),
    *("Temperature", "TopH", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta"),
    "LogitNormalization",
]


def test_everything_in_the_order_of_transformers():
    assert names(build(GenerationConfig(**EVERYTHING))) == ORDER
    assert names(build(GenerationConfig.from_dict(EVERYTHING))) == ORDER


def test_own_processors_come_before_the_warpers():
    def own(input_ids, scores, cur_len):
        return scores

    chain = build(GenerationConfig(**EVERYTHING), extra=[own])
    index = chain.index(own)
    assert names(chain[index - 1 : index]) == ["SuppressTokensAtBegin"]
    assert names(chain[index + 1 : index + 2]) == ["Temperature"]
    with pytest.raises(InputError, match="callables"):
        build(GenerationConfig(), extra=[3])


def test_an_own_processor_takes_the_place_of_a_built_in_one():
    own = P.RepetitionPenaltyLogitsProcessor(3.0)
    chain = build(GenerationConfig(repetition_penalty=1.5, suppress_tokens=[1]), extra=[own])
    assert names(chain) == ["RepetitionPenalty", "SuppressTokens"]
    assert chain[0] is own


def test_default_settings_build_no_processors():
    assert names(build(GenerationConfig())) == []
    assert names(build(GenerationConfig(do_sample=True))) == ["Temperature", "TopK", "TopP"]
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0}
    assert names(build(GenerationConfig.from_dict(neutral))) == []
    warpers = GenerationConfig.from_dict({"temperature": 0.5, "top_k": 3, "min_p": 0.2})
    assert names(build(warpers)) == []


@pytest.mark.ci
def test_a_number_given_in_code_stays_in_the_program_when_neutral():
    traces = []

    @jax.jit
    def step(chain, scores):
        traces.append(1)
        return chain(jnp.asarray(PROMPT), scores, 3)

    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 23)), jnp.float32)
    results = []
    for penalty, typical, size, least in [(1.0, 1.0, 0, 0), (1.7, 0.5, 2, 9), (1.0, 1.0, 0, 0)]:
        config = GenerationConfig(
            do_sample=True,
            top_k=0,
            repetition_penalty=penalty,
            typical_p=typical,
            no_repeat_ngram_size=size,
            min_length=least,
        )
        results.append(np.asarray(step(build(config), scores)))
    assert len(traces) == 1
    np.testing.assert_array_equal(results[0], scores)
    np.testing.assert_array_equal(results[0], results[2])
    assert not np.array_equal(results[0], results[1])


def test_min_new_tokens_wins_over_min_length():
    config = GenerationConfig(min_length=9, min_new_tokens=1)
    assert names(build(config)) == ["MinNewTokensLength"]


@pytest.mark.parametrize(
    ("fields", "prompt_len", "begin"),
    [
        ({}, 1, 1),
        ({}, 4, 4),
        ({"forced_bos_token_id": 2}, 1, 2),
        ({"forced_bos_token_id": 2}, 4, 4),
    ],
)
def test_the_first_token_that_is_not_forced(fields, prompt_len, begin):
    config = GenerationConfig(begin_suppress_tokens=[5], **fields)
    assert build(config, prompt_len=prompt_len)[-1].begin_index.tolist() == [begin]
    traced = jax.jit(lambda n: build(config, prompt_len=n)[-1].begin_index)(prompt_len)
    assert traced.tolist() == [begin]


def test_beams_keep_more_than_the_end_tokens():
    config = GenerationConfig(do_sample=True, num_beams=2)
    assert build(config, eos=(1, 2))[-1].min_tokens_to_keep == 3
    assert build(config, eos=())[-1].min_tokens_to_keep == 2
    assert build(config.replace(num_beams=1))[-1].min_tokens_to_keep == 1


@pytest.mark.ci
def test_the_prompt_stands_in_for_the_encoder():
    config = GenerationConfig(encoder_repetition_penalty=2.0)
    scores = jnp.ones((2, 23))
    actual = build(config)(PROMPT, scores, 3)
    assert np.flatnonzero(actual[0] == 2.0).tolist() == [5, 6]  # not the padding, token 0
    encoder = np.array([[9, 8], [8, 8]])
    actual = build(config, encoder_ids=encoder, encoder_mask=None)(PROMPT, scores, 3)
    assert np.flatnonzero(actual[0] == 2.0).tolist() == [8, 9]
    for field in ({"encoder_repetition_penalty": 2.0}, {"encoder_no_repeat_ngram_size": 2}):
        with pytest.raises(InputError, match=next(iter(field))):
            build(GenerationConfig(**field), encoder_ids=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[1], [2, 23]]),
        ("sequence_bias", {(23,): 1.0}),
        ("suppress_tokens", [23]),
        ("begin_suppress_tokens", [99]),
        ("forced_bos_token_id", 23),
        ("forced_eos_token_id", [1, 23]),
    ],
)
def test_tokens_outside_the_vocabulary_are_named(name, value):
    with pytest.raises(InputError, match=f"`{name}` names token"):
        build(GenerationConfig(**{name: value}))


def test_end_tokens_are_checked_and_needed():
    with pytest.raises(InputError, match="`eos_token_id` names token 23"):
        build(GenerationConfig(), eos=(1, 23))
    with pytest.raises(InputError, match="needs an `eos_token_id`"):
        build(GenerationConfig(exponential_decay_length_penalty=(1, 1.5)), eos=())
    assert names(build(GenerationConfig(min_length=5), eos=())) == ["MinLength"]


@pytest.mark.ci
def test_lengths_and_numbers_may_be_traced():
    @jax.jit
    def step(scores, cur_len, prompt_len, max_length, temperature, penalty):
        config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            repetition_penalty=penalty,
            forced_eos_token_id=1,
            min_new_tokens=2,
        )
        chain = build(config, prompt_len=prompt_len, max_length=max_length)
        return chain(PROMPT, scores, cur_len)

    scores = jnp.ones((2, 23))
    early = step(scores, 2, 1, 10, 0.5, 2.0)
    assert early[1, :6].tolist() == [2.0, -jnp.inf, 2.0, 2.0, 1.0, 1.0]
    last = step(scores, 3, 1, 4, 0.5, 2.0)
    assert np.flatnonzero(np.isfinite(last[0])).tolist() == [1]
