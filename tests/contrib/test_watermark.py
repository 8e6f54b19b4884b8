"""Watermarks against transformers' own, in processors and in detectors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import program_count
from paths import DATA

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark import (
    SynthIDTextWatermarkingConfig,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
    watermarking_config,
)
from jaxllm.contrib.watermark.synthid import (
    SynthIDTextWatermarkLogitsProcessor,
    mean_score,
    weighted_mean_score,
)
from jaxllm.contrib.watermark.torch_numbers import (
    Int64,
    first_of_permutation,
    permutation,
    smallest,
)

CASES = json.loads((DATA / "watermark" / "reference.json").read_text())
ARRAYS = np.load(DATA / "watermark" / "reference.npz")


@jax.jit
def run(processor, ids, scores, cur_len, kwargs):
    return processor(ids, scores, cur_len, **kwargs)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def as_ints(wide: Int64) -> list[int]:
    pairs = zip(np.ravel(wide.hi).tolist(), np.ravel(wide.lo).tolist(), strict=True)
    return [signed((hi << 32) + lo) for hi, lo in pairs]


def test_lefthash_is_seeded_by_the_newest_token_of_its_context():
    processor = WatermarkLogitsProcessor(vocab_size=50, greenlist_ratio=0.5, context_width=2)
    scores = jnp.zeros((3, 50))
    same_end, same_start = [[5, 6, 7], [9, 8, 7]], [[5, 6, 8]]
    first, second, other = np.asarray(processor(jnp.array(same_end + same_start), scores, 3))
    assert (first == second).all()
    assert (first != other).any()


@pytest.mark.ci
def test_int64_is_exact():
    rng = np.random.default_rng(0)
    edges = [0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**31, -(2**31)]
    a = edges + [int(x) for x in rng.integers(-(2**63), 2**63, 40)]
    b = list(reversed(a))
    x, y = Int64.of_ints(a), Int64.of_ints(b)
    x, y = jax.tree.map(jnp.asarray, (x, y))
    assert as_ints(x) == a
    assert as_ints(x.plus(y)) == [signed(i + j) for i, j in zip(a, b, strict=True)]
    assert as_ints(x.times(y)) == [signed(i * j) for i, j in zip(a, b, strict=True)]
    assert x.less(y).tolist() == [i < j for i, j in zip(a, b, strict=True)]
    for divisor in (1, 2, 3, 1000, 65536, 2**24, 2**24 - 3):
        assert x.modulo(divisor).tolist() == [i % divisor for i in a]
    assert as_ints(smallest(x.map(lambda half: half[None]))) == [min(a)]


def test_permutation_is_torchs():
    np.testing.assert_array_equal(permutation(2**33 + 5, 1000), ARRAYS["permutation"])


@pytest.mark.by_default("7-0")
@pytest.mark.parametrize(("size", "count"), [(2, 1), (7, 0), (7, 6), (700, 699), (5000, 1250)])
def test_first_of_permutation_in_parallel(size, count):
    some = jax.jit(first_of_permutation, static_argnums=(1, 2))
    for seed in (0, 1, 2**32 - 1):
        expected = np.zeros(size, bool)
        expected[permutation(seed, size)[:count]] = True
        np.testing.assert_array_equal(some(jnp.uint32(seed), size, count), expected)


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES["green"])
def test_green_lists_are_those_of_transformers(name):
    processor = WatermarkLogitsProcessor(**CASES["green"][name])
    ids, scores, green = (ARRAYS[f"{name}/{part}"] for part in ("ids", "scores", "green"))
    buffer = np.pad(ids, ((0, 0), (0, 3)), constant_values=99)
    actual = np.asarray(run(processor, buffer, scores, ids.shape[1], {}))
    np.testing.assert_array_equal(actual != scores, green)
    np.testing.assert_allclose(actual, scores + green * np.asarray(processor.bias), rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_green_lists_do_not_see_padding(scheme):
    processor = WatermarkLogitsProcessor(60, seeding_scheme=scheme, context_width=3)
    scores = np.random.default_rng(1).normal(size=(1, 60)).astype(np.float32)
    single = run(processor, np.array([[5, 6, 7]]), scores, 3, {})
    assert (single != scores).any()
    for ids, mask in (([0, 0, 5, 6, 7], [0, 0, 1, 1, 1]), ([5, 6, 0, 0, 7], [1, 1, 0, 0, 1])):
        padded = {"mask": np.array([mask], bool)}
        np.testing.assert_array_equal(run(processor, np.array([ids]), scores, 5, padded), single)
    short = {"mask": np.array([[0, 0, 0, 1, 1]], bool)}
    np.testing.assert_array_equal(
        run(processor, np.array([[0, 0, 5, 6, 7]]), scores, 5, short), scores
    )


@pytest.mark.ci
def test_numbers_of_the_watermark_compile_nothing():
    scores = np.zeros((1, 60), np.float32)
    for scheme in ("lefthash", "selfhash"):
        run.clear_cache()
        seen = set()
        for key, bias in ((3, 1.0), (2**40, 1.0), (3, 2)):
            processor = WatermarkLogitsProcessor(60, 0.5, bias, key, scheme)
            seen.add(np.asarray(run(processor, np.array([[5]]), scores, 1, {})).tobytes())
        assert len(seen) == 3
        assert program_count(run) == 1


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES["detector"])
def test_detector(name):
    case = CASES["detector"][name]
    model = SimpleNamespace(vocab_size=40, bos_token_id=1)
    detector = WatermarkDetector(model, case["config"], case["unique"])
    out = detector(ARRAYS[f"{name}/ids"], return_dict=True)
    for field in ("num_tokens_scored", "num_green_tokens", "z_score", "p_value"):
        np.testing.assert_allclose(getattr(out, field), ARRAYS[f"{name}/{field}"], rtol=1e-9)


@pytest.mark.ci
def test_detector_leaves_out_padding_and_names_bad_rows():
    ids = ARRAYS["detect_left/ids"]
    detector = WatermarkDetector(SimpleNamespace(vocab_size=40, bos_token_id=1), {})
    single = detector(ids[:1], return_dict=True)
    padded = detector(
        np.pad(ids[:1], ((0, 0), (0, 9))),
        return_dict=True,
        attention_mask=np.pad(np.ones_like(ids[:1]), ((0, 0), (0, 9))),
    )
    assert single.z_score == padded.z_score
    with pytest.raises(InputError, match="some rows begin with BOS"):
        detector(np.array([[1, 2, 3], [2, 3, 4]]))
    with pytest.raises(InputError, match="has 1 before it"):
        detector(np.array([[1, 2]]))


@pytest.fixture(scope="module")
def model():
    return jaxllm.load(DATA / "conformance" / "models" / "s_llama")[0]


def generated(model, processor, seed):
    ids = np.array([[52, 90, 101], [78, 117, 25]])
    settings = {"max_new_tokens": 60, "do_sample": True, "eos_token_id": None}
    out = jaxllm.generate(model, ids, key=seed, logits_processor=processor, **settings)
    return out.sequences[:, 3:]


@pytest.mark.ci
def test_what_generate_marks_the_detector_finds(model):
    config = WatermarkingConfig(bias=6.0, context_width=2)
    marker = [config.construct_processor(model.config.vocab_size)]
    detector = WatermarkDetector(model.config, config)
    assert detector(generated(model, marker, 1)).all()
    assert not detector(generated(model, [], 1)).any()
    other = WatermarkDetector(model.config, WatermarkingConfig(hashing_key=5, context_width=2))
    assert not other(generated(model, marker, 1)).any()


@pytest.mark.by_default("synthid-init")
@pytest.mark.parametrize(
    ("name", "given"), [*((name, "call") for name in CASES["synthid"]), ("synthid", "init")]
)
def test_synthid_is_that_of_transformers(name, given):
    case = CASES["synthid"][name]
    known = {"prompt_len": case["prompt"]}
    processor = SynthIDTextWatermarkLogitsProcessor(
        **case["init"], **(known if given == "init" else {})
    )
    ids, scores, expected = (ARRAYS[f"{name}/{part}"] for part in ("ids", "scores", "out"))
    buffer = np.pad(ids, ((0, 0), (0, 3)), constant_values=2)
    for step in range(len(scores)):
        length = case["prompt"] + step
        actual = run(processor, buffer, scores[step], length, {} if given == "init" else known)
        np.testing.assert_allclose(actual, expected[step], rtol=1e-4, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES["synthid"])
def test_bits_and_masks_of_synthid(name):
    processor = SynthIDTextWatermarkLogitsProcessor(**CASES["synthid"][name]["init"])
    ids = ARRAYS[f"{name}/ids"]
    np.testing.assert_array_equal(processor.compute_g_values(ids), ARRAYS[f"{name}/g_values"])
    np.testing.assert_array_equal(
        processor.compute_context_repetition_mask(ids), ARRAYS[f"{name}/new_contexts"]
    )
    np.testing.assert_array_equal(
        processor.compute_eos_token_mask(ids, 3), ARRAYS[f"{name}/before_end"]
    )


@pytest.mark.ci
def test_synthid_scores_tell_marked_text(model):
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=list(range(1, 31)))
    marker = config.construct_processor(prompt_len=3)
    means = {}
    for name, processors in (("marked", [marker]), ("plain", [])):
        text = generated(model, processors, 2)
        bits = marker.compute_g_values(text)
        mask = marker.compute_context_repetition_mask(text)
        means[name] = np.asarray(mean_score(bits, mask))
        assert (weighted_mean_score(bits, mask, np.ones(30)) == means[name]).all()
        weighted = weighted_mean_score(bits, mask)
        assert (weighted > means[name]).all() == (name == "marked")
    assert (means["marked"] > 0.53).all()
    assert (abs(means["plain"] - 0.5) < 0.03).all()


def test_mean_scores_by_hand():
    bits = np.array([[[1, 0], [1, 1], [0, 0]]])
    mask = np.array([[1, 1, 0]])
    assert mean_score(bits, mask).tolist() == [0.75]
    np.testing.assert_allclose(weighted_mean_score(bits, mask), [(10 / 11 + 1) / 2], rtol=1e-6)


def test_expected_mean_of_synthid_by_enumeration():
    """A round keeps the better of two tokens, each with a random bit."""
    size = 3
    bits = np.stack(np.meshgrid(*[[0, 1]] * size), -1).reshape(-1, size)
    expected = np.maximum(bits[:, :, None], bits[:, None]).mean()
    processor = SynthIDTextWatermarkLogitsProcessor(ngram_len=5, keys=[1, 2])
    assert processor.expected_mean_g_value(size) == pytest.approx(expected)


def test_numbers_of_synthid_compile_nothing():
    run.clear_cache()
    scores = np.random.default_rng(0).normal(size=(1, 30)).astype(np.float32)
    seen = set()
    for keys, seed, start in (([1, 2], 0, 1), ([3, 2**60], 0, 1), ([1, 2], 9, 1), ([1, 2], 0, 2)):
        processor = SynthIDTextWatermarkLogitsProcessor(
            3, keys, sampling_table_seed=seed, prompt_len=start
        )
        seen.add(np.asarray(run(processor, np.array([[5, 6, 7]]), scores, 3, {})).tobytes())
    assert len(seen) == 4
    assert program_count(run) == 1


def test_synthid_needs_the_length_of_the_prompt():
    processor = SynthIDTextWatermarkLogitsProcessor(3, [1])
    with pytest.raises(InputError, match="needs `prompt_len`"):
        processor(np.zeros((1, 3), np.int32), np.zeros((1, 4)), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeding_scheme": "right"}, "seeding_scheme"),
        ({"greenlist_ratio": 1.0}, "greenlist_ratio"),
        ({"context_width": 0}, "context_width"),
        ({"hashing_key": 2**60}, "hashing_key"),
        ({"bias": "2"}, "bias"),
        ({"colour": "green"}, "'colour' is not among the settings"),
        ({"ngram_len": 5}, "missing .*argument: 'keys'"),
        ({"ngram_len": 1, "keys": [1]}, "ngram_len"),
        ({"ngram_len": 5, "keys": []}, "keys"),
        ({"ngram_len": 5, "keys": [2**63]}, "keys"),
        ({"ngram_len": 5, "keys": [1], "sampling_table_size": 2**24 + 1}, "sampling_table_size"),
        ({"ngram_len": 5, "keys": [1], "debug_mode": 1}, "debug_mode"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(InputError, match=message):
        watermarking_config(changes)


@pytest.mark.ci
def test_settings_from_a_file():
    assert watermarking_config({}) == WatermarkingConfig()
    config = watermarking_config({"ngram_len": 5, "keys": [1, 2]})
    assert config == SynthIDTextWatermarkingConfig(5, (1, 2))
    assert watermarking_config(config.to_dict()) == config
    assert watermarking_config(config) is config
    with pytest.raises(InputError, match="expected a WatermarkingConfig"):
        watermarking_config(3)
