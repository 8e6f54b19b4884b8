"""Logits processors: conformance, garbage in the buffer, padding, and no recompilation."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import DATA

from jaxllm.common.errors import InputError
from jaxllm.generation import processors as P
from jaxllm.generation.processors.base import RowProcessors

CASES = [
    case
    for case in json.loads((DATA / "conformance" / "cases.json").read_text())["cases"]
    if case["kind"] == "processor"
]
IDS = [case["id"].removeprefix("s-lp-") for case in CASES]
ONE_OF_EACH = list({case["cls"]: case for case in CASES}.values())
CLASSES = [case["cls"] for case in ONE_OF_EACH]
LENGTH_RULES = {
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
}
ABOUT_LENGTHS = [case for case in ONE_OF_EACH if case["cls"] in LENGTH_RULES]
WITHOUT_LENGTHS = [case for case in ONE_OF_EACH if case["cls"] not in LENGTH_RULES]
INF = float("inf")


def floats(rows) -> np.ndarray:
    return np.array([[float(value) for value in row] for row in rows], np.float32)


def build(case, **changes):
    return getattr(P, case["cls"])(**{**case["init"], **changes})


def arguments(case):
    call = {name: jnp.asarray(value) for name, value in case["call"].items()}
    return np.array(case["input_ids"], np.int32), floats(case["scores"]), call


def check(got, case) -> None:
    expected = floats(case["expected"]["scores"])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-4)


@jax.jit
def run(processor, ids, scores, cur_len, kwargs):
    return processor(ids, scores, cur_len, **kwargs)


def with_garbage(ids, columns=5):
    rng = np.random.default_rng(ids.sum())
    garbage = rng.integers(-40, 40, (ids.shape[0], columns))
    return np.concatenate([ids, garbage], axis=1).astype(np.int32)


@pytest.mark.by_default(
    "00-TemperatureLogitsWarper",
    "05-MinPLogitsWarper",
    "06-MinPLogitsWarper",
    "09-EpsilonLogitsWarper",
    "10-EpsilonLogitsWarper",
    "13-RepetitionPenaltyLogitsProcessor",
    "14-RepetitionPenaltyLogitsProcessor",
    "23-MinLengthLogitsProcessor",
    "25-MinNewTokensLengthLogitsProcessor",
    "26-ForcedBOSTokenLogitsProcessor",
    "27-ForcedBOSTokenLogitsProcessor",
    "29-ForcedEOSTokenLogitsProcessor",
    "30-ForcedEOSTokenLogitsProcessor",
    "32-ExponentialDecayLengthPenalty",
    "34-SuppressTokensAtBeginLogitsProcessor",
    "35-SuppressTokensAtBeginLogitsProcessor",
    "36-LogitNormalization",
    "37-InfNanRemoveLogitsProcessor",
)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_columns_beyond_cur_len_do_not_count(case):
    ids, scores, call = arguments(case)
    check(run(build(case), with_garbage(ids), scores, ids.shape[1], call), case)


@pytest.mark.in_ci(
    "EncoderNoRepeatNGramLogitsProcessor-left",
    "NoBadWordsLogitsProcessor-left",
    "NoRepeatNGramLogitsProcessor-left",
    "RepetitionPenaltyLogitsProcessor-left",
    "SequenceBiasLogitsProcessor-left",
    "TopKLogitsWarper-left",
    "TopPLogitsWarper-left",
    "TypicalLogitsWarper-left",
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", WITHOUT_LENGTHS, ids=lambda case: case["cls"])
def test_padding_is_as_if_it_were_not_there(case, side):
    ids, scores, call = arguments(case)
    count, real = 3, np.ones_like(ids, bool)
    pads = np.random.default_rng(1).integers(0, 23, (ids.shape[0], count))
    # Right padding: between a prompt and what was generated after it.
    index = 0 if side == "left" else ids.shape[1] // 2
    padded = np.concatenate([ids[:, :index], pads, ids[:, index:]], axis=1)
    mask = np.concatenate([real[:, :index], np.zeros_like(pads, bool), real[:, index:]], axis=1)
    buffer = with_garbage(padded)
    mask = np.concatenate([mask, np.ones((ids.shape[0], 5), bool)], axis=1)
    check(run(build(case), buffer, scores, padded.shape[1], {**call, "mask": mask}), case)


@pytest.mark.parametrize("case", ABOUT_LENGTHS, ids=lambda case: case["cls"])
def test_rules_about_lengths_count_padding(case):
    ids, scores, call = arguments(case)
    mask = np.ones_like(ids, bool)
    mask[:, 0] = False
    check(run(build(case), ids, scores, ids.shape[1], {**call, "mask": mask}), case)


# Diversity is a rule about rows that belong together.
ROW_BY_ROW = [case for case in ONE_OF_EACH if case["cls"] != "HammingDiversityLogitsProcessor"]


@pytest.mark.in_ci(
    "EncoderNoRepeatNGramLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
@pytest.mark.parametrize("case", ROW_BY_ROW, ids=lambda case: case["cls"])
def test_rows_of_different_lengths_give_what_each_gives_alone(case):
    ids, scores, call = arguments(case)
    lengths = np.maximum(1, ids.shape[1] - np.arange(ids.shape[0])).astype(np.int32)
    processor = build(case)
    together = run(processor, ids, scores, lengths, call)
    for row, length in enumerate(lengths):
        single = run(processor, ids, scores, np.full_like(lengths, length), call)
        np.testing.assert_array_equal(together[row], single[row])


@pytest.mark.by_default(
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "TemperatureLogitsWarper"
)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=CLASSES)
def test_works_in_a_while_loop_and_under_vmap(case):
    ids, scores, call = arguments(case)
    buffer, processor = with_garbage(ids), build(case)

    @jax.jit
    def both(processor, start):
        def body(state):
            step, _ = state
            return step + 1, processor(jnp.asarray(buffer), scores, step, **call)

        looped = jax.lax.while_loop(lambda s: s[0] <= ids.shape[1], body, (start, scores))[1]
        stack = jnp.stack([scores] * 2)
        mapped = jax.vmap(lambda s: processor(buffer, s, ids.shape[1], **call))(stack)
        return looped, mapped[1]

    for actual in both(processor, ids.shape[1] - 1):
        check(actual, case)


ENCODER = np.array([[3, 1, 2, 1], [0, 0, 1, 3]], np.int32)
CHANGES = [
    ("TemperatureLogitsWarper", [{"temperature": 1}, {"temperature": 0.3}]),
    ("TopKLogitsWarper", [{"top_k": 0}, {"top_k": 3}, {"top_k": np.int64(7)}, {"top_k": 9999}]),
    ("TopPLogitsWarper", [{"top_p": 1}, {"top_p": 0.0}, {"top_p": np.float64(0.5)}]),
    ("MinPLogitsWarper", [{"min_p": 0.1}, {"min_p": 1}]),
    ("TopHLogitsWarper", [{"top_h": 0.1}, {"top_h": 1}]),
    ("TypicalLogitsWarper", [{"mass": 1.0}, {"mass": 0.2}]),
    ("EpsilonLogitsWarper", [{"epsilon": 0.0}, {"epsilon": 0.2}]),
    ("EtaLogitsWarper", [{"epsilon": 0}, {"epsilon": 0.2}]),
    ("RepetitionPenaltyLogitsProcessor", [{"penalty": 1}, {"penalty": 1.7}]),
    (
        "PresencePenaltyLogitsProcessor",
        [{"penalty": 0.5, "prompt_len": 1}, {"penalty": 1.7, "prompt_len": 2}],
    ),
    (
        "FrequencyPenaltyLogitsProcessor",
        [{"penalty": 0.5, "prompt_len": 1}, {"penalty": 1.7, "prompt_len": 2}],
    ),
    ("LogitBiasLogitsProcessor", [{"logit_bias": {1: 1.0}}, {"logit_bias": {2: 3.0, 3: 1.0}}]),
    (
        "EncoderRepetitionPenaltyLogitsProcessor",
        [{"penalty": p, "encoder_input_ids": ENCODER} for p in (1, 2.0)],
    ),
    ("NoRepeatNGramLogitsProcessor", [{"ngram_size": n} for n in (0, 1, 2, 3, 100)]),
    (
        "EncoderNoRepeatNGramLogitsProcessor",
        [{"encoder_ngram_size": n, "encoder_input_ids": ENCODER} for n in (0, 1, 2)],
    ),
    (
        "SequenceBiasLogitsProcessor",
        [{"sequence_bias": {(1,): 1.0}}, {"sequence_bias": [[[2, 1], -3], [[0, 1, 3], 2.0]]}],
    ),
    (
        "NoBadWordsLogitsProcessor",
        [
            {"bad_words_ids": [[1]], "eos_token_id": None},
            {"bad_words_ids": [[2, 1], [3], [0, 1, 3]], "eos_token_id": [3, 4]},
        ],
    ),
    (
        "MinLengthLogitsProcessor",
        [{"min_length": 0, "eos_token_id": 1}, {"min_length": 9, "eos_token_id": [0, 2, 3]}],
    ),
    (
        "MinNewTokensLengthLogitsProcessor",
        [
            {"prompt_length_to_skip": n, "min_new_tokens": m, "eos_token_id": e}
            for n, m, e in [(1, 0, 1), (3, 8, (1, 2))]
        ],
    ),
    ("ForcedBOSTokenLogitsProcessor", [{"bos_token_id": 0}, {"bos_token_id": 5}]),
    (
        "ForcedEOSTokenLogitsProcessor",
        [{"max_length": 5, "eos_token_id": 1}, {"max_length": 9, "eos_token_id": [1, 2]}],
    ),
    (
        "ExponentialDecayLengthPenalty",
        [
            {"exponential_decay_length_penalty": d, "eos_token_id": e, "input_ids_seq_length": n}
            for d, e, n in [((0, 1.5), 1, 2), ((2, 1), [1, 2], 1)]
        ],
    ),
    ("SuppressTokensLogitsProcessor", [{"suppress_tokens": s} for s in ([], [1], [1, 2, 3])]),
    (
        "SuppressTokensAtBeginLogitsProcessor",
        [{"begin_suppress_tokens": s, "begin_index": i} for s, i in [([1], 4), ([2, 3], 2)]],
    ),
    (
        "HammingDiversityLogitsProcessor",
        [{"diversity_penalty": p, "num_beams": 2, "num_beam_groups": 2} for p in (0.5, 2)],
    ),
]


@pytest.mark.by_default(
    "EpsilonLogitsWarper",
    "FrequencyPenaltyLogitsProcessor",
    "LogitBiasLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
)
@pytest.mark.parametrize(("name", "settings"), CHANGES, ids=[name for name, _ in CHANGES])
def test_other_numbers_do_not_trace_again(name, settings):
    traces = []

    @jax.jit
    def step(processor, ids, scores, cur_len, call):
        traces.append(name)
        return processor(ids, scores, cur_len, **call)

    ids = np.array([[1, 2, 1, 2, 0], [0, 1, 0, 1, 3]], np.int32)
    scores = np.random.default_rng(0).normal(size=(2, 23)).astype(np.float32)
    call = {"current_tokens": ids[:, :2].ravel(), "beam_group_idx": 1} if "Hamming" in name else {}
    results: list[np.ndarray] = []
    for chosen in settings:
        for cur_len in (1, 4, 5):
            processor = getattr(P, name)(**chosen)
            results.append(np.asarray(step(processor, ids, scores, np.int32(cur_len), call)))
    assert len(traces) == 1
    assert any(not np.array_equal(results[0], other) for other in results[1:])


# Encoder inputs are rows of their own, and diversity is a rule about the beams of a row.
OWN_ROWS = [pair for pair in CHANGES if "Encoder" not in pair[0] and "Hamming" not in pair[0]]


@pytest.mark.by_default("LogitBiasLogitsProcessor", "NoRepeatNGramLogitsProcessor")
@pytest.mark.parametrize(("name", "settings"), OWN_ROWS, ids=[name for name, _ in OWN_ROWS])
def test_rows_of_different_parameters_give_what_each_gives_alone(name, settings):
    ids = np.random.default_rng(1).integers(0, 4, (2 * len(settings), 6)).astype(np.int32)
    scores = np.random.default_rng(0).normal(size=(len(ids), 23)).astype(np.float32)
    lengths = np.arange(len(settings), dtype=np.int32) % 3 + 3
    lists = [P.LogitsProcessorList([getattr(P, name)(**chosen)]) for chosen in settings]
    together = run(RowProcessors.of(lists), ids, scores, lengths, {})
    for row, (alone, length) in enumerate(zip(lists, lengths, strict=True)):
        both = slice(2 * row, 2 * row + 2)
        expected = run(alone, ids[both], scores[both], length, {})
        np.testing.assert_array_equal(together[both], expected)


def test_only_rows_of_their_own_parameters_look_for_neutral_ones():
    """A call has only processors with an effect, so it does not pay for the test."""
    ids, scores, lengths = np.ones((2, 3), np.int32), np.ones((2, 5)), np.full(2, 3)
    alone = P.LogitsProcessorList([P.RepetitionPenaltyLogitsProcessor(2.0)])
    conditions = [
        run.lower(processors, ids, scores, lengths, {}).as_text().count("stablehlo.case")
        for processors in (alone, RowProcessors.of([alone, alone]))
    ]
    assert conditions == [0, 1]


def test_every_processor_is_covered_here():
    numberless = {"InfNanRemoveLogitsProcessor", "LogitNormalization"}
    # The host's processor is tested with its twin, the host's criterion.
    tools = {"HostLogitsProcessor", "LogitsProcessor", "LogitsProcessorList", "logits_processor"}
    # These have tests of their own: test_guidance, test_prefix.
    tools |= {
        "PrefixConstrainedLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
    assert {name for name, _ in CHANGES} | numberless | tools == set(P.__all__)
    # transformers does not have these: test_openai_penalties.
    tools |= {
        "FrequencyPenaltyLogitsProcessor",
        "LogitBiasLogitsProcessor",
        "PresencePenaltyLogitsProcessor",
    }
    assert {case["cls"] for case in CASES} | tools == set(P.__all__)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: P.TemperatureLogitsWarper(0.0), "do_sample=False"),
        (lambda: P.TemperatureLogitsWarper(-1.0), "temperature"),
        (lambda: P.TemperatureLogitsWarper(True), "temperature"),
        (lambda: P.TemperatureLogitsWarper(np.ones(3)), "temperature"),
        (lambda: P.LogitBiasLogitsProcessor(3), "logit_bias"),
        (lambda: P.LogitBiasLogitsProcessor({-1: 2.0}), "logit_bias"),
        (lambda: P.LogitBiasLogitsProcessor({1: float("nan")}), "logit_bias"),
        (lambda: P.TopKLogitsWarper(-1), "top_k"),
        (lambda: P.TopKLogitsWarper(2.5), "top_k"),
        (lambda: P.TopKLogitsWarper(5, min_tokens_to_keep=0), "min_tokens_to_keep"),
        (lambda: P.TopPLogitsWarper(1.1), "top_p"),
        (lambda: P.TopPLogitsWarper(float("nan")), "top_p"),
        (lambda: P.TopPLogitsWarper("0.9"), "top_p"),
        (lambda: P.MinPLogitsWarper(-0.1), "min_p"),
        (lambda: P.TopHLogitsWarper(0.0), "top_h"),
        (lambda: P.TypicalLogitsWarper(0.0), "mass"),
        (lambda: P.EpsilonLogitsWarper(1.0), "epsilon"),
        (lambda: P.EtaLogitsWarper(-0.1), "epsilon"),
        (lambda: P.RepetitionPenaltyLogitsProcessor(0.0), "penalty"),
        (lambda: P.RepetitionPenaltyLogitsProcessor(1.1, -1), "prompt_ignore_length"),
        (lambda: P.EncoderRepetitionPenaltyLogitsProcessor(-1.0, ENCODER), "penalty"),
        (
            lambda: P.EncoderRepetitionPenaltyLogitsProcessor(1.0, ENCODER, ENCODER[:, :2] > 0),
            "encoder_input_ids",
        ),
        (lambda: P.NoRepeatNGramLogitsProcessor(-1), "ngram_size"),
        (lambda: P.EncoderNoRepeatNGramLogitsProcessor(1.5, ENCODER), "encoder_ngram_size"),
        (lambda: P.SequenceBiasLogitsProcessor({}), "sequence_bias"),
        (lambda: P.SequenceBiasLogitsProcessor({(): 1.0}), "sequence_bias"),
        (lambda: P.SequenceBiasLogitsProcessor({(-1,): 1.0}), "sequence_bias"),
        (lambda: P.SequenceBiasLogitsProcessor([[[1], "x"]]), "sequence_bias"),
        (lambda: P.NoBadWordsLogitsProcessor([]), "bad_words_ids"),
        (lambda: P.NoBadWordsLogitsProcessor([1]), "bad_words_ids"),
        (lambda: P.NoBadWordsLogitsProcessor([[1.5]]), "bad_words_ids"),
        (lambda: P.MinLengthLogitsProcessor(-1, 2), "min_length"),
        (lambda: P.MinLengthLogitsProcessor(2**40, 2), "min_length"),
        (lambda: P.MinNewTokensLengthLogitsProcessor(-1, 2, 3), "prompt_length_to_skip"),
        (lambda: P.MinNewTokensLengthLogitsProcessor(1, -2, 3), "min_new_tokens"),
        (lambda: P.ForcedBOSTokenLogitsProcessor(-1), "bos_token_id"),
        (lambda: P.ForcedEOSTokenLogitsProcessor(5, [1.5]), "eos_token_id"),
        (lambda: P.ExponentialDecayLengthPenalty((1,), 2, 3), "exponential_decay"),
        (lambda: P.ExponentialDecayLengthPenalty((1, 0.0), 2, 3), "exponential_decay"),
        (lambda: P.SuppressTokensLogitsProcessor(["a"]), "suppress_tokens"),
        (lambda: P.HammingDiversityLogitsProcessor(1.0, 2, 3), "num_beam_groups"),
        (lambda: P.HammingDiversityLogitsProcessor(1.0, 1, 1), "num_beams"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(InputError, match=named):
        make()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda x: P.NoBadWordsLogitsProcessor([[x]]), "bad_words_ids"),
        (lambda x: P.SequenceBiasLogitsProcessor({(1,): x}), "sequence_bias"),
        (lambda x: P.LogitBiasLogitsProcessor({1: x}), "logit_bias"),
    ],
)
def test_tables_on_the_host_hold_no_tracers(make, named):
    with pytest.raises(InputError, match=f"`{named}` must be"):
        jax.jit(make)(1)


@pytest.mark.ci
def test_numbers_may_be_tracers():
    @jax.jit
    def step(temperature, top_k, top_p, eos, scores):
        chain = P.LogitsProcessorList(
            [
                P.MinLengthLogitsProcessor(9, eos),
                P.TemperatureLogitsWarper(temperature),
                P.TopKLogitsWarper(top_k),
                P.TopPLogitsWarper(top_p),
            ]
        )
        return chain(jnp.zeros((1, 4), jnp.int32), scores, 2)

    scores = jnp.array([[4.0, 3.0, 2.0, 1.0, 0.0]])
    actual = step(0.5, 2, 1.0, jnp.array([0]), scores)
    assert actual.tolist() == [[-INF, 6.0, 4.0, -INF, -INF]]


@pytest.mark.ci
def test_penalties_ignore_the_columns_they_are_told_to():
    ids, scores = jnp.array([[0, 1, 2], [0, 1, 2]]), jnp.full((2, 4), 2.0)
    actual = P.RepetitionPenaltyLogitsProcessor(2.0, np.array([1, 2]))(ids, scores, 3)
    assert actual.tolist() == [[2.0, 1.0, 1.0, 2.0], [2.0, 2.0, 1.0, 2.0]]
    actual = P.RepetitionPenaltyLogitsProcessor(2.0, 3)(ids, scores, 3)
    assert actual.tolist() == scores.tolist()


@pytest.mark.ci
def test_padding_of_the_encoder_does_not_count():
    ids = jnp.array([[5, 1]])
    single, mask = jnp.array([[5, 1, 2]]), jnp.array([[True, True, False, True]])
    padded = jnp.array([[5, 1, 0, 2]])
    scores = jax.random.normal(jax.random.key(0), (1, 6))
    for make in (
        lambda *encoder: P.EncoderRepetitionPenaltyLogitsProcessor(3.0, *encoder),
        lambda *encoder: P.EncoderNoRepeatNGramLogitsProcessor(3, *encoder),
    ):
        expected = make(single)(ids, scores, 2)
        assert not np.array_equal(expected, scores)
        np.testing.assert_array_equal(make(padded, mask)(ids, scores, 2), expected)


@pytest.mark.ci
def test_encoder_rows_are_repeated_for_beams():
    scores = jnp.full((4, 4), 1.0)
    ids = jnp.zeros((4, 1), int)
    actual = P.EncoderNoRepeatNGramLogitsProcessor(1, ENCODER[:, :1])(ids, scores, 1)
    assert np.argwhere(np.isneginf(actual)).tolist() == [[0, 3], [1, 3], [2, 0], [3, 0]]
    with pytest.raises(InputError, match="3 rows"):
        P.EncoderNoRepeatNGramLogitsProcessor(1, ENCODER)(ids[:3], scores[:3], 1)


@pytest.mark.ci
def test_tokens_outside_the_scores_are_left_alone():
    """An embedding may have more rows than the head, and a buffer may hold anything."""
    ids, scores = jnp.array([[-1, 99, 1, -1, 99]]), jnp.ones((1, 3))
    assert P.RepetitionPenaltyLogitsProcessor(2.0)(ids, scores, 5).tolist() == [[1.0, 0.5, 1.0]]
    assert P.NoRepeatNGramLogitsProcessor(1)(ids, scores, 5).tolist() == [[1.0, -INF, 1.0]]
    assert P.NoRepeatNGramLogitsProcessor(2)(ids, scores, 5).tolist() == [[1.0, -INF, 1.0]]


@pytest.mark.ci
def test_a_forbidden_word_counts_once_and_stays_forbidden():
    words = P.NoBadWordsLogitsProcessor([[1], [0, 1], [2]], eos_token_id=2)
    actual = words(jnp.array([[0]]), jnp.zeros((1, 3)), 1)
    assert actual.tolist() == [[0.0, -INF, 0.0]]
    only_eos = P.NoBadWordsLogitsProcessor([[2]], eos_token_id=2)
    assert only_eos(jnp.array([[0]]), jnp.zeros((1, 3)), 1).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.ci
def test_an_end_token_that_is_forbidden_does_not_decay():
    penalty = P.ExponentialDecayLengthPenalty((0, 2.0), [0, 1], 1)
    actual = penalty(jnp.zeros((1, 3), jnp.int32), jnp.array([[-INF, 1.0, 1.0]]), 2)
    assert actual.tolist() == [[-INF, 2.0, 1.0]]
    long = penalty(jnp.zeros((1, 3), jnp.int32), jnp.array([[-INF, 1.0, 1.0]]), 2000)
    assert bool(jnp.all(long[0, 1:] < INF))


@pytest.mark.ci
def test_the_order_of_two_processors_matters_and_is_kept():
    bias, temperature = P.SequenceBiasLogitsProcessor({(1,): 1.0}), P.TemperatureLogitsWarper(0.5)
    ids, scores = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 2))
    assert P.LogitsProcessorList([bias, temperature])(ids, scores, 1).tolist() == [[0.0, 2.0]]
    assert P.LogitsProcessorList([temperature, bias])(ids, scores, 1).tolist() == [[0.0, 1.0]]


def test_a_list_is_a_pytree_and_takes_plain_functions():
    def double(input_ids, scores, cur_len):
        return scores * 2

    def masked(input_ids, scores, cur_len, mask):
        return scores + mask[:, :1]

    chain = P.LogitsProcessorList([P.TemperatureLogitsWarper(0.5), double, masked])
    traces = []

    @jax.jit
    def step(chain, scores):
        traces.append(1)
        return chain(jnp.zeros((1, 2), jnp.int32), scores, 1, mask=jnp.ones((1, 2), bool))

    scores = jnp.ones((1, 2))
    assert step(chain, scores).tolist() == [[5.0, 5.0]]
    other = P.LogitsProcessorList([P.TemperatureLogitsWarper(1.0), double, masked])
    assert step(other, scores).tolist() == [[3.0, 3.0]]
    assert len(traces) == 1
    assert isinstance(jax.tree.map(lambda leaf: leaf, chain), P.LogitsProcessorList)
    assert len(jax.tree.leaves(chain)) == 1


def test_a_processor_of_ones_own_may_have_leaves():
    @P.logits_processor()
    class Shift(P.LogitsProcessor):
        amount: jax.Array

        def __init__(self, amount):
            object.__setattr__(self, "amount", jnp.float32(amount))

        def process(self, history, scores):
            return scores + self.amount * history.real.sum()

    chain = P.LogitsProcessorList([Shift(2.0)])
    assert run(chain, jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 2)), 3, {}).tolist() == [[6, 6]]


@pytest.mark.by_default(
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=CLASSES)
def test_without_cur_len_all_columns_count(case):
    """Called as transformers does: ``processor(input_ids, scores)``."""
    ids, scores, call = arguments(case)
    check(build(case)(ids, scores, **call), case)
    check(P.LogitsProcessorList([build(case)])(ids, scores, **call), case)


@pytest.mark.ci
def test_input_ids_may_be_none_where_only_scores_are_read():
    """Called as transformers' Flax tests do: ``warper(None, scores, cur_len=None)``."""
    scores = np.log([[0.2, 0.5, 0.3]])
    warpers = [P.TemperatureLogitsWarper(0.5), P.TopKLogitsWarper(2), P.LogitNormalization()]
    out = P.LogitsProcessorList(warpers)(None, scores, cur_len=None)
    np.testing.assert_allclose(np.exp(out), [[0, 25 / 34, 9 / 34]], rtol=1e-5)
    with pytest.raises(InputError, match="NoRepeatNGramLogitsProcessor: needs `input_ids`"):
        P.NoRepeatNGramLogitsProcessor(2)(None, scores)


@pytest.mark.ci
def test_half_precision_scores_become_float32():
    scores = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    ids = jnp.zeros((1, 1), jnp.int32)
    assert P.TopKLogitsWarper(1)(ids, scores, 1).dtype == jnp.float32
    assert P.LogitsProcessorList()(ids, scores, 1).dtype == jnp.float32


def test_lengths_of_rows_are_repeated_for_their_sequences() -> None:
    """A length for each row counts for its adjacent sequences, also for a function of the host."""
    ids = np.array([[3, 4, 4], [3, 4, 4], [4, 4, 5], [4, 4, 5]])
    scores = np.zeros((4, 6), np.float32)
    rows = P.FrequencyPenaltyLogitsProcessor(1.0, prompt_len=np.array([1, 2]))(ids, scores)
    alone = [
        P.FrequencyPenaltyLogitsProcessor(1.0, prompt_len=length)(ids[i : i + 1], scores[:1])
        for i, length in enumerate((1, 1, 2, 2))
    ]
    np.testing.assert_array_equal(rows, np.concatenate(alone))

    shapes = []

    def note(input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        shapes.append(input_ids.shape)
        return scores

    jax.block_until_ready(P.HostLogitsProcessor(note)(ids, scores, jnp.array([2])))
    assert shapes == [(1, 2)] * 4
    shapes.clear()
    jax.block_until_ready(P.HostLogitsProcessor(note)(ids, scores, 2))
    assert shapes == [(4, 2)]
