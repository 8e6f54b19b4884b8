"""Models as objects of a notebook: their repr, pickle, and optax's trees of labels."""

from __future__ import annotations

import copy
import pickle

import jax
import numpy as np
import optax
import pytest
import tiny

from jaxllm.errors import InputError
from jaxllm.models.llama import LlamaConfig, LlamaForCausalLM
from jaxllm.models.weights import parameters
from jaxllm.tokenizers.byte_level import byte_tokenizer

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "gpt2": ("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    "t5": ("T5ForConditionalGeneration", "T5EncoderModel"),
}
MODELS = [(family, name) for family, names in ARCHITECTURES.items() for name in names]


def test_a_large_model_is_shown_in_a_few_lines():
    model = jax.eval_shape(lambda: LlamaForCausalLM(LlamaConfig(), rngs=None))
    assert repr(model) == str(model)
    lines = repr(model).splitlines()
    assert lines[0] == "LlamaForCausalLM: 6,738,415,616 parameters, float32"
    assert [line.split()[0] for line in lines[1:]] == [
        "backbone.embed",
        "backbone.stack.blocks.0-31",
        "backbone.stack.norm",
        "lm_head",
    ]
    assert "32 x  202,383,360  attn (k, o, q, v), attn_norm, mlp (down, gate, up)" in lines[2]


def test_blocks_that_differ_have_lines_of_their_own():
    model = tiny.make("llama", num_hidden_layers=4)
    first, _, *others = model.backbone.stack.blocks
    blocks = jax.tree.map(lambda x: x, model)
    blocks.backbone.stack.blocks[1].mlp = first.attn
    lines = [line.split()[0] for line in repr(blocks).splitlines()]
    assert len(others) == 2
    assert [line for line in lines if "blocks" in line] == [
        "backbone.stack.blocks.0",
        "backbone.stack.blocks.1",
        "backbone.stack.blocks.2-3",
    ]


@pytest.mark.by_default("llama-LlamaForCausalLM", "t5-T5EncoderModel")
@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_a_call_with_something_else_has_a_short_error(family, architecture):
    model = tiny.make(family, architecture=architecture)
    with pytest.raises(TypeError) as caught:
        model(**object())
    assert len(str(caught.value)) < 1000


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tokenizers_output_is_a_call(family):
    tokenizer = byte_tokenizer()
    model = tiny.make(family, vocab_size=len(tokenizer))
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="np")
    expected = model(batch.input_ids, batch.attention_mask).logits
    np.testing.assert_array_equal(model(**batch).logits, expected)
    with pytest.raises(KeyError):
        batch["labels"]


@pytest.mark.ci
@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_optax_takes_labels_and_masks_made_from_a_model(family, architecture):
    model = tiny.make(family, architecture=architecture)
    labels = jax.tree.map_with_path(
        lambda path, _: "trained" if "norm" in jax.tree_util.keystr(path) else "frozen", model
    )
    assert repr(labels).endswith("leaves of type str")
    optimizer = optax.multi_transform(
        {"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels
    )
    gradients = jax.tree.map(np.ones_like, model)
    updates, _ = optimizer.update(gradients, optimizer.init(model), model)
    for update, label in zip(jax.tree.leaves(updates), jax.tree.leaves(labels), strict=True):
        assert np.all(update == (-1 if label == "trained" else 0))
    decayed = optax.add_decayed_weights(0.5, mask=jax.tree.map(lambda x: x == "trained", labels))
    updates, _ = decayed.update(gradients, decayed.init(model), model)
    jax.tree.map(
        lambda update, x, label: np.testing.assert_array_equal(
            update, 1 + 0.5 * x if label == "trained" else np.ones_like(x)
        ),
        *(updates, model, labels),
    )


def test_a_model_is_not_an_input_of_another_call():
    model = tiny.make("llama")
    with pytest.raises(InputError, match="input_ids"):
        model(model)


@pytest.mark.by_default("gpt2-GPT2ForSequenceClassification-deepcopy")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_copies_and_pickles_share_compiled_programs(family, architecture, copied):
    model = tiny.make(family, architecture=architecture)
    again = copied(model)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)


@pytest.mark.in_ci("relu6", "sigmoid")
@pytest.mark.parametrize(
    "act", ["silu", "relu", "relu6", "leaky_relu", "hardswish", "mish", "sigmoid", "tanh"]
)
def test_models_of_every_activation_are_pickled(act):
    pickle.dumps(tiny.make("llama", hidden_act=act))


@pytest.mark.by_default("llama-LlamaForSequenceClassification")
@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_embeddings_are_resized(family, architecture, tmp_path):
    model = tiny.make(family, architecture=architecture, tie_word_embeddings=False)
    larger = model.resize_token_embeddings(53)
    assert (larger.config.vocab_size, model.config.vocab_size) == (53, 50)
    old, new = (np.asarray(each.embedding.weight[...]) for each in (model, larger))
    np.testing.assert_array_equal(new[:50], old)
    np.testing.assert_allclose(new[50:], np.tile(old.mean(0), (3, 1)), atol=1e-6)
    if model.is_encoder_decoder or hasattr(model, "lm_head"):
        logits = tiny.logits(larger, np.full((1, 4), 51))
        assert logits.shape[-1] == 53
        expected = tiny.logits(model)
        np.testing.assert_allclose(tiny.logits(larger)[..., :50], expected, rtol=1e-5, atol=1e-5)
    larger.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, parameters(again), parameters(larger))
    smaller = larger.resize_token_embeddings(50)
    jax.tree.map(np.testing.assert_array_equal, parameters(smaller), parameters(model))


@pytest.mark.ci
def test_no_special_token_loses_its_row():
    with pytest.raises(InputError, match=r"resize_token_embeddings\(2\): eos_token_id"):
        tiny.make("llama").resize_token_embeddings(2)
