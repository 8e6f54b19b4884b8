"""Losses against their definitions in numpy, and against the models' own."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from devices import on_devices

from jaxllm.common.errors import InputError
from jaxllm.models.lora import LoraConfig, add_lora
from jaxllm.models.losses import next_labels
from jaxllm.training.losses import (
    CausalLoss,
    Seq2SeqLoss,
    TokenLoss,
    has_any,
    has_any_by_sum,
    is_argmax,
    loss_for,
)
from jaxllm.training.state import split_model


def logits_and_labels(seed: int = 0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 5, 11)).astype(np.float32) * 3
    labels = rng.integers(0, 11, (3, 5)).astype(np.int32)
    labels[0, 2:] = -100
    return logits, labels


def test_the_first_token_of_a_packed_document_is_no_label():
    """The token before it is of another document."""
    labels, segments = jnp.array([[5, 6, 7, 8, 9, 4]]), jnp.array([[1, 1, 2, 2, 2, 0]])
    found = next_labels(labels, segments=segments)
    assert found.tolist() == [[6, -100, 8, 9, -100, -100]]


@pytest.mark.ci
def test_labels_of_a_narrow_type_in_a_wide_vocabulary():
    """V itself does not fit into int16; forward and reverse derivatives see the same labels."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 4, 40_000)), jnp.float32)
    labels = np.array([[7, 32_767, -100, 0]])

    def loss(logits, labels):
        return TokenLoss().of_tokens(logits, jnp.asarray(labels)).loss

    narrow = labels.astype(np.int16)
    np.testing.assert_array_equal(loss(logits, narrow), loss(logits, labels))
    assert loss(logits, labels) > 25  # three times ln V and more
    gradient = jax.grad(loss)(logits, narrow)
    way = jnp.asarray(rng.normal(size=logits.shape), jnp.float32)
    slope = jax.jvp(lambda x: loss(x, narrow), (logits,), (way,))[1]
    np.testing.assert_allclose(jnp.vdot(gradient, way), slope, rtol=1e-4)
    expected = jax.nn.softmax(logits[0, 1]).at[32_767].add(-1)
    np.testing.assert_allclose(gradient[0, 1], expected, atol=1e-6)


@pytest.mark.by_default("0.01-0.0", "0.01-0.1")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z", [0.0, 0.01])
def test_the_definition(smoothing, z):
    logits, labels = logits_and_labels()
    sums = TokenLoss(label_smoothing=smoothing, z_loss=z).of_tokens(
        jnp.asarray(logits), jnp.asarray(labels)
    )
    total = right = 0.0
    for row, column in zip(*np.nonzero(labels != -100), strict=True):
        x, y = logits[row, column].astype(np.float64), labels[row, column]
        log_z = np.log(np.exp(x).sum())
        target = np.full(11, smoothing / 11)
        target[y] += 1 - smoothing
        total += -(target * (x - log_z)).sum() + z * log_z**2
        right += x.argmax() == y
    np.testing.assert_allclose(float(sums.loss), total, rtol=1e-5)
    assert float(sums.count) == (labels != -100).sum() == 12
    assert float(sums.correct) == right


@pytest.mark.ci
def test_of_equal_logits_the_first_is_predicted():
    """Not all of them: a model that has collapsed would have an accuracy of 1."""
    logits = jnp.asarray([[0.0] * 4] * 4 + [[1.0, 3.0, 3.0, 2.0]] * 4)
    labels = jnp.asarray([0, 1, 2, 3, 0, 1, 2, -100])
    assert float(TokenLoss().of_tokens(logits, labels).correct) == 2
    right = is_argmax(logits, labels)
    assert right.tolist() == (jnp.argmax(logits, -1) == labels).tolist()


def test_a_tpu_finds_a_true_entry_by_a_sum():
    x = jnp.asarray([[False, False], [False, True], [True, True]])
    assert has_any_by_sum(x).tolist() == has_any(x).tolist() == [False, True, True]


@pytest.mark.ci
def test_labels_of_minus_100_have_no_gradient():
    logits, labels = logits_and_labels()
    loss = TokenLoss(label_smoothing=0.1, z_loss=0.01)
    gradient = jax.grad(lambda x: loss.of_tokens(x, jnp.asarray(labels)).loss)(jnp.asarray(logits))
    assert (np.asarray(gradient)[labels == -100] == 0).all()
    assert (np.abs(np.asarray(gradient)[labels != -100]).max(-1) > 0).all()


@pytest.mark.by_default("t5")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_mean_is_the_model_s_own_loss(family):
    """With a tied head, whose inputs T5 scales."""
    model = tiny.make(family, tie_word_embeddings=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 50, (4, 7)).astype(np.int32)
    labels = np.where(rng.random(ids.shape) < 0.3, -100, ids).astype(np.int32)
    sums = loss_for(model)(model, {"input_ids": ids, "labels": labels})
    assert isinstance(loss_for(model), Seq2SeqLoss if family == "t5" else CausalLoss)
    expected = model(ids, labels=labels).loss
    np.testing.assert_allclose(float(sums.loss / sums.count), float(expected), rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_side_of_the_padding_changes_nothing(family):
    """Padding on the left would else predict the first token of its row, from nothing."""
    model = tiny.cached(family)
    ids = np.random.default_rng(0).integers(3, 50, (1, 6)).astype(np.int32)
    mask, left, right = np.ones_like(ids), ((0, 0), (3, 0)), ((0, 0), (0, 3))

    def both(pad):
        batch = {"input_ids": np.pad(ids, pad), "attention_mask": np.pad(mask, pad)}
        labels = np.pad(ids, pad, constant_values=-100)
        sums = loss_for(model)(model, {**batch, "labels": labels})
        own = model(batch["input_ids"], batch["attention_mask"], labels=labels).loss
        return float(sums.count), float(sums.loss / sums.count), float(own)

    expected = pytest.approx(both(right), rel=1e-5)
    assert both(left) == expected
    assert expected == (5, *[float(model(ids, labels=ids).loss)] * 2)


PROBLEMS = {
    "single_label_classification": (3, np.array([2, 0, 1, 2], np.int32)),
    "multi_label_classification": (3, np.array([[1, 0, 1]] * 2 + [[0, 0, 1]] * 2, np.float32)),
    "regression": (1, np.array([0.5, -1.0, 2.0, 0.0], np.float32)),
}


@pytest.mark.ci
@pytest.mark.parametrize("problem", PROBLEMS)
def test_classification(problem):
    classes, labels = PROBLEMS[problem]
    model = tiny.make(
        "llama",
        architecture="LlamaForSequenceClassification",
        id2label={str(i): str(i) for i in range(classes)},
        problem_type=problem,
        pad_token_id=0,
    )
    ids = np.random.default_rng(0).integers(3, 50, (4, 7)).astype(np.int32)
    mask = np.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    loss = loss_for(model)
    sums, out = loss(model, batch), model(ids, mask, labels=labels)
    np.testing.assert_allclose(float(sums.loss / 4), float(out.loss), rtol=1e-5)
    logits = np.asarray(out.logits)
    right = {
        "single_label_classification": lambda: (logits.argmax(-1) == labels).sum(),
        "multi_label_classification": lambda: ((logits > 0) == labels).all(-1).sum(),
        "regression": lambda: 0,
    }[problem]()
    assert (float(sums.count), float(sums.correct)) == (4, right)
    weighted = loss(model, {**batch, "weights": np.array([1, 1, 0, 0], np.float32)})
    half = loss(model, {name: x[:2] for name, x in batch.items()})
    np.testing.assert_allclose(float(weighted.loss), float(half.loss), rtol=1e-5)
    assert (float(weighted.count), weighted.correct) == (2, half.correct)
    if problem.startswith("single"):
        ignored = loss(model, {**batch, "labels": np.array([2, 0, -100, -100], np.int32)})
        np.testing.assert_allclose(float(ignored.loss), float(half.loss), rtol=1e-5)
        assert float(ignored.count) == 2


def test_settings_that_cannot_be():
    with pytest.raises(InputError, match="label_smoothing: expected 0 to 1"):
        CausalLoss(label_smoothing=1.5)
    with pytest.raises(InputError, match="z_loss: expected 0 or more"):
        CausalLoss(z_loss=-1.0)
    classifier = tiny.make("gpt2", architecture="GPT2ForSequenceClassification")
    with pytest.raises(InputError, match="max_logits: only for language models"):
        loss_for(classifier, max_logits=8)
    with pytest.raises(InputError, match="max_logits: expected an integer of 1 or more, found 0"):
        loss_for(tiny.cached("llama"), max_logits=0)
    assert loss_for(tiny.cached("llama"), max_logits=8).max_logits == 8
    with pytest.raises(InputError, match="z_loss: only for language models"):
        loss_for(classifier, z_loss=0.1)
    with pytest.raises(InputError, match="T5EncoderModel: has no labels to predict"):
        loss_for(tiny.make("t5", architecture="T5EncoderModel"))


def in_chunks(family, make_loss, batch, key=None, **changes):
    """Sums and gradients of a loss at once, and with chunks of two columns."""
    model = tiny.make(family, **changes)
    rows, vocab_size = len(batch["labels"]), model.config.vocab_size

    def run(max_logits):
        loss = make_loss(max_logits=max_logits)

        def scalar(model):
            sums = loss(model, batch, key)
            return 0.5 * sums.loss, sums

        (_, sums), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(model)
        return sums, jax.jit(loss)(model, batch, key), gradients

    return run(1 << 27), run(2 * rows * vocab_size)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"tie_word_embeddings": True}),
        ("llama", {}),
        ("t5", {"tie_word_embeddings": True}),
        pytest.param("t5", {"tie_word_embeddings": False}, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_columns_give_the_same_sums_and_gradients(family, changes):
    """An odd number of columns, packed rows, ignored labels, label smoothing and z-loss."""
    ids = np.random.default_rng(0).integers(3, 50, (4, 7)).astype(np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 0]] * 4, np.int32)
    batch = {"input_ids": ids, "labels": ids, "segment_ids": segments}
    if family == "t5":
        batch["decoder_segment_ids"] = segments
    batch["labels"] = np.where(segments == 0, -100, ids)
    make_loss = partial(
        Seq2SeqLoss if family == "t5" else CausalLoss, label_smoothing=0.1, z_loss=0.01
    )
    full, chunked = in_chunks(family, make_loss, batch, **changes)
    # Biases of keys have no gradient but for rounding, so the largest one sets the scale.
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(full[2]))
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6 * scale)


@pytest.mark.ci
def test_chunks_of_a_head_with_lora():
    """Gradients of a frozen head's LoRA alone, DoRA included, and of its dropout."""
    model = add_lora(
        tiny.make("llama"), LoraConfig(targets=("lm_head",), dora=True, dropout=0.25), key=1
    )
    structure, params = split_model(model)
    ids = np.random.default_rng(0).integers(3, 50, (4, 8)).astype(np.int32)
    batch = {"input_ids": ids, "labels": ids}
    trained = {path: x for path, x in params.items() if "lora_" in path}

    def gradients(max_logits, key=None):
        loss = CausalLoss(max_logits=max_logits)

        def scalar(trained):
            return loss(structure.model({**params, **trained}), batch, key).loss

        return jax.jit(jax.grad(scalar))(trained)

    full, chunked = gradients(1 << 27), gradients(2 * 4 * 50)
    for path in trained:
        np.testing.assert_allclose(chunked[path], full[path], rtol=2e-5, atol=1e-4)
    dropped = gradients(2 * 4 * 50, jax.random.key(0))
    assert np.any(np.asarray(dropped["lm_head.lora_b"]) != chunked["lm_head.lora_b"])


@pytest.mark.ci
def test_a_chunked_loss_never_holds_the_logits_of_all_tokens():
    model = tiny.make("llama", vocab_size=53)
    ids = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    batch = {"input_ids": ids, "labels": ids}

    def arrays_of_logits(loss):
        gradient = jax.grad(lambda model, batch: loss(model, batch).loss)
        text = jax.jit(gradient).lower(model, batch).compile().as_text()
        shapes = [shape.split(",") for shape in re.findall(r"\[([\d,]+)\]", text)]
        sizes = [math.prod(map(int, shape)) for shape in shapes if "53" in shape]
        return [size for size in sizes if size >= 4 * 32 * 53]

    assert arrays_of_logits(CausalLoss()) != []
    assert arrays_of_logits(CausalLoss(max_logits=8 * 4 * 53)) == []


ON_A_MESH = """
import sys
from functools import partial
import jax, numpy as np, tiny
from jaxllm.models.weights import parameters
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import batch_sharding, make_mesh, use_mesh
from jaxllm.training.losses import CausalLoss, Seq2SeqLoss

def gradients(loss, model, ids):
    return jax.value_and_grad(lambda m: loss(m, {"input_ids": ids, "labels": ids}).loss)(model)

ids = tiny.ids(8, 9)
for family in sys.argv[1:]:
    model = tiny.make(family)
    make = partial(Seq2SeqLoss if model.is_encoder_decoder else CausalLoss, 0.1, 1e-3)
    expected_loss, expected = jax.jit(partial(gradients, make()))(model, ids)
    largest = max(np.abs(x).max() for x in map(np.asarray, jax.tree.leaves(expected)))
    for sizes in (dict(fsdp=8), dict(data=2, fsdp=2, tensor=2), dict(data=8)):
        mesh = make_mesh(**{"data": 1, **sizes})
        for max_logits in (10**6, 2 * model.config.vocab_size):  # at once, and in chunks
            there = put_tree(model, mesh), jax.device_put(ids, batch_sharding(mesh))
            with use_mesh(mesh):
                loss, found = jax.jit(partial(gradients, make(max_logits)))(*there)
            np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
            for path, x in parameters(found).items():
                np.testing.assert_allclose(
                    x, parameters(expected)[path], atol=3e-5 * largest, err_msg=f"{sizes} {path}")
print("done")
"""


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "t5", "bart"])
def test_gradients_on_a_mesh(family: str) -> None:
    """Weights are gathered for their products, and the head's gradient is reduced once."""
    assert on_devices(ON_A_MESH, family) == "done\n"
