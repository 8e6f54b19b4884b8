"""A model is an ordinary pytree: its structure is what the forward pass reads, and no card."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from paths import DATA
from test_config_fields import ACTS, DROPOUT, OTHERS

import jaxllm
from jaxllm.checkpoint.peft import save_adapter
from jaxllm.common.errors import ConfigError, InputError
from jaxllm.models.build_options import Options
from jaxllm.models.lora import LoraConfig
from jaxllm.models.model import Card, model_shapes
from jaxllm.models.quantize import quantize_model
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters
from jaxllm.nn.rope import ROPE_TYPES
from jaxllm.training.lora import add_lora

LLAMA = DATA / "reference" / "tiny-llama"
LAYERDROP = {"encoder_layerdrop", "decoder_layerdrop"}  # they raise in training
SHIFT = {"pad_token_id", "decoder_start_token_id"}  # read by the shift of labels
LENGTH = {"max_position_embeddings"}  # rows of a table, or a limit
READ = {  # of the fields that keep the logits
    "t5": SHIFT,
    **dict.fromkeys(("bart", "marian", "pegasus"), SHIFT | LENGTH | LAYERDROP),
    "mbart": {"pad_token_id"} | LENGTH | LAYERDROP,
    "m2m_100": {"decoder_start_token_id"} | LAYERDROP,
    "t5gemma": {"pad_token_id"},
    "gpt2": {"n_positions", "add_cross_attention"},  # they have weights
    "mixtral": {"output_router_logits", "router_aux_loss_coef"},  # of the loss
    "qwen3_moe": {"output_router_logits"},
    "xglm": {"layerdrop", "add_cross_attention"},
    **dict.fromkeys(("opt", "gpt_neo"), LENGTH),
}
CLASSIFIER_READS = {"num_labels", "pad_token_id", "problem_type"}


def shapes(family, architecture=None, **changes):
    raw = {**(tiny.CONFIGS[family] if isinstance(family, str) else family), **changes}
    spec = model_spec(raw, architecture)
    return model_shapes(spec.make, spec.config, Options())


def signature(model):
    """Everything that compiled programs depend on, in both views of NNX."""
    leaves, treedef = jax.tree.flatten(model)
    return treedef, [(x.shape, x.dtype) for x in leaves], nnx.split(model)[0]


def fields(table):
    return [(family, field) for family, values in table.items() for field in values]


@pytest.mark.by_default("llama-eos_token_id", "llama-initializer_range", "t5-pad_token_id")
@pytest.mark.parametrize(("family", "field"), fields(OTHERS))
def test_a_field_without_effect_is_not_in_the_structure(family, field):
    changed = shapes(family, **{field: OTHERS[family][field]})
    equal = signature(changed) == signature(shapes(family))
    assert equal == (field not in READ.get(family, set()))


@pytest.mark.by_default("llama-rms_norm_eps", "mistral-sliding_window")
@pytest.mark.parametrize(("family", "field"), [*fields(ACTS), *fields(DROPOUT)])
def test_a_field_with_an_effect_is_in_the_structure(family, field):
    value = {**ACTS[family], **DROPOUT[family]}[field]
    assert signature(shapes(family, **{field: value})) != signature(shapes(family))


@pytest.mark.by_default("problem_type", "eos_token_id")
@pytest.mark.parametrize("field", sorted(OTHERS["gpt2"].keys() - READ["gpt2"]))
def test_what_a_classifier_reads(field):
    name = "GPT2ForSequenceClassification"
    changed = shapes("gpt2", name, **{field: OTHERS["gpt2"][field]})
    equal = signature(changed) == signature(shapes("gpt2", name))
    assert equal == (field not in CLASSIFIER_READS)


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("llama", {"head_dim": None}, {"head_dim": 8}),
        ("llama", {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ("llama", {"rope_scaling": None}, {"original_max_position_embeddings": 16}),
        ("gpt2", {"n_inner": None}, {"n_inner": 128}),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2},
            {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "sliding_window": 8},
            {"sliding_window": 9},
        ),
        (
            "t5",
            {"feed_forward_proj": "gated-gelu"},
            {"dense_act_fn": "gelu_new", "is_gated_act": True},
        ),
        ("t5", {"num_decoder_layers": None}, {"num_decoder_layers": 2}),
    ],
)
def test_two_spellings_of_one_architecture_are_equal(family, first, second):
    models = shapes(family, **first), shapes(family, **{**first, **second})
    assert models[0].config != models[1].config
    assert signature(models[0]) == signature(models[1])


@pytest.mark.by_default("dynamic", "yarn")
@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_max_positions_are_in_the_structure_for_dynamic_rope_alone(kind):
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if kind == "default":
        scaling = None
    short, long = (
        shapes("llama", rope_scaling=scaling, max_position_embeddings=n) for n in (64, 128)
    )
    assert (signature(short) == signature(long)) == (kind != "dynamic")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Loads of two checkpoints of one architecture, which differ in everything beside that."""
    base, tokenizer = jaxllm.load(LLAMA)
    settings = jaxllm.GenerationConfig(eos_token_id=5, do_sample=True)
    config = dataclasses.replace(base.config, eos_token_id=7, max_position_embeddings=999)
    other = jax.tree.map(lambda x: x + 1, base).with_card(base.card, config=config)
    other.generation_config = settings
    folder = tmp_path_factory.mktemp("other")
    jaxllm.save_hf(folder, other, tokenizer, dtype="bfloat16")
    return base, jaxllm.load(folder, param_dtype="float32")[0]


def test_checkpoints_of_one_architecture_can_be_averaged_and_share_programs(two):
    first, second = two
    assert first.card != second.card
    average = jax.tree.map(lambda x, y: (x + y) / 2, first, second)
    np.testing.assert_allclose(
        average.backbone.embed.weight[...],
        (first.backbone.embed.weight[...] + second.backbone.embed.weight[...]) / 2,
    )
    traces = []

    @jax.jit
    def total(model):
        traces.append(model)
        return sum(x.sum() for x in jax.tree.leaves(model))

    jax.block_until_ready([total(first), total(second), total(average)])
    assert len(traces) == 1
    assert traces[0].card is None
    first_graph, second_graph = nnx.split(first)[0], nnx.split(second)[0]
    assert first_graph == second_graph
    stack = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    sizes = jax.vmap(lambda model: model.backbone.embed.weight[...].sum())(stack)
    assert sizes.shape == (2,)


def test_optax_takes_a_model(two):
    optimizer = optax.adam(0.1)
    state = optimizer.init(two[0])
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, two[0]), state, two[0])
    moved = optax.apply_updates(two[0], updates)
    np.testing.assert_allclose(
        moved.backbone.embed.weight[...], two[0].backbone.embed.weight[...] - 0.1, atol=1e-5
    )


def test_what_loses_the_card_and_what_keeps_it(two):
    model = two[0]
    graphdef, state = nnx.split(model)
    lost = (
        jax.tree.map(lambda x: x, model),
        jax.jit(lambda model: model)(model),
        nnx.merge(graphdef, state),
        nnx.clone(model),
    )
    assert [each.card for each in lost] == [None] * 4
    kept = (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    assert all(each.card == model.card for each in kept)
    assert all(each.with_card(model.card).card is model.card for each in lost)


CHANGES = {
    "stacked": (lambda x: jnp.stack([x, x]), r"expected float.* found float32\[2, \d"),
    "integers": (lambda x: x.astype(jnp.int32), r"expected float.* found int32\[\d"),
    "comparison": (lambda x: x > 0, r"found bool\[\d"),
    "rows": (lambda x: x[:1], r"found float32\[1"),
    "shapes": (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), r"found ShapeDtypeStruct"),
    "numbers": (lambda x: x.size, r"found \d"),
    "nothing": (lambda x: None, r"found None"),
}


@pytest.mark.parametrize("kind", ["plain", "lora", "quantized"])
@pytest.mark.parametrize("change", CHANGES)
def test_arrays_that_are_not_those_of_the_config_are_not_saved(change, kind, two, tmp_path):
    made = {"plain": two[0], "lora": add_lora(two[0]), "quantized": quantize_model(two[0], "int8")}
    function, message = CHANGES[change]
    model = made[kind]
    changed = jax.tree.map(function, model).with_card(model.card)
    if kind == "quantized":
        message = r"expected (u?int8|float)"
    save = {"hf": jaxllm.save_hf, "orbax": jaxllm.save_orbax, "adapter": save_adapter}
    for name in ("hf", "orbax") if kind != "lora" else ("adapter",):
        with pytest.raises(InputError, match=rf"^save_{name}: [\w.]+: .*{message}"):
            save[name](tmp_path / name, changed)
    assert list(tmp_path.iterdir()) == []


def test_one_array_of_lora_that_is_stacked(two, tmp_path):
    model = add_lora(two[0])
    layer = model.backbone.stack.blocks[0].attn.q
    layer.lora_b = nnx.Param(jnp.stack([layer.lora_b[...]] * 2))
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.q\.lora_b: expected float\[64, 8\]"):
        save_adapter(tmp_path, model)


def test_arrays_on_the_host_are_saved(two, tmp_path):
    """`jax.device_get` makes NumPy arrays of a model."""
    jaxllm.save_hf(tmp_path, jax.device_get(two[0]).with_card(two[0].card))
    again = parameters(jaxllm.load(tmp_path)[0])
    for path, x in parameters(two[0]).items():
        np.testing.assert_array_equal(again[path], x)


def test_what_needs_the_card_says_so_before_it_acts(two, tmp_path):
    bare = jax.tree.map(lambda x: x, two[0])
    lora = jax.tree.map(lambda x: x, add_lora(two[0]))
    calls = {
        "save_hf": lambda: jaxllm.save_hf(tmp_path / "hf", bare),
        "save_orbax": lambda: jaxllm.save_orbax(tmp_path / "orbax", bare),
        "save_adapter": lambda: save_adapter(tmp_path / "adapter", lora),
        "add_lora": lambda: add_lora(bare),
        "resize_token_embeddings": lambda: bare.resize_token_embeddings(9),
        "generation_config": lambda: bare.generation_config,
    }
    for name, call in calls.items():
        with pytest.raises(
            InputError, match=rf"^{name}: .*use model.with_card\(original.card\), for a new"
        ):
            call()
    assert list(tmp_path.iterdir()) == []


def test_generate_without_a_card_needs_explicit_settings(two):
    bare, ids = jax.tree.map(lambda x: x, two[0]), [[5, 6]]
    for given, missing in (
        ({}, "eos_token_id, pad_token_id, max_new_tokens"),
        ({"eos_token_id": 3, "pad_token_id": 0}, "max_new_tokens"),
        ({"generation_config": {"max_length": 5}}, "eos_token_id, pad_token_id"),
    ):
        with pytest.raises(InputError, match=f"^{missing}: not given, and unknown"):
            jaxllm.generate(bare, ids, **given)
    settings = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 3}
    expected = jaxllm.generate(two[0], ids, **settings).sequences
    np.testing.assert_array_equal(jaxllm.generate(bare, ids, **settings).sequences, expected)
    with_card = bare.with_card(two[0].card, generation_config=jaxllm.GenerationConfig(**settings))
    np.testing.assert_array_equal(jaxllm.generate(with_card, ids).sequences, expected)


def test_a_card_of_another_architecture_is_refused(two):
    with pytest.raises(
        InputError, match=r"^with_card: the card belongs to a model of another arch"
    ):
        two[0].with_card(tiny.cached("llama").card)
    with pytest.raises(InputError, match=r"^card: expected the card of a model, found"):
        two[0].with_card(two[0].config)


def test_settings_that_are_assigned_are_no_part_of_the_structure():
    model = tiny.make("llama")
    before = signature(model)
    model.generation_config = jaxllm.GenerationConfig(max_new_tokens=2)
    model.config = dataclasses.replace(model.config, eos_token_id=9)
    assert signature(model) == before
    assert model.card.generation_config.max_new_tokens == 2
    assert model.config.eos_token_ids == (9,)


def test_a_card_that_does_not_fit_is_refused(tmp_path):
    """The card of the model before LoRA would leave out what was trained, and a config without
    special tokens would generate without an end and be saved as invalid."""
    base = tiny.make("llama")
    tuned = add_lora(base, LoraConfig(rank=2, modules_to_save=("embed_tokens",)), key=0)
    trained = jax.tree.map(lambda x: x, tuned)
    with pytest.raises(InputError, match="save_adapter: the card belongs to the model before LoRA"):
        save_adapter(tmp_path, trained.with_card(base.card))
    save_adapter(tmp_path, trained.with_card(tuned.card))
    bare = jax.tree.map(lambda x: x, base)
    for config in (bare.config, 3):
        with pytest.raises((InputError, ConfigError), match="config"):
            bare.with_card(Card(config))
