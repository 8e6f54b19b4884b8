"""LoRA on whole models: where it is put, that it changes nothing at first, what is trained."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.models.build_options import Options
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.nn.lora import LoraLinear
from jaxllm.training.lora import (
    LoraConfig,
    add_lora,
    is_trainable,
    lora_layers,
    merge_lora,
    partition,
)

KINDS = {"lora": {}, "dora with rslora": {"dora": True, "rslora": True}}
CLASSIFIERS = {"llama": "LlamaForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}


def trained(model, seed: int = 0):
    """The model with other values of all that is trained."""
    rng = np.random.default_rng(seed)
    values = {
        path: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype)
        for path, x in partition(model)[0].items()
    }
    return with_parameters(model, values)


def targets(model, *patterns: str) -> list[str]:
    return list(lora_layers(add_lora(model, LoraConfig(targets=patterns))))


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_starts_equal_and_merges_equal(family, kind):
    base = tiny.cached(family)
    model = add_lora(base, LoraConfig(rank=3, **KINDS[kind]))
    np.testing.assert_allclose(tiny.logits(model), tiny.logits(base), atol=1e-5)
    model = trained(model)
    changed = tiny.logits(model)
    assert np.abs(changed - tiny.logits(base)).max() > 0.1
    merged = merge_lora(model)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(tiny.logits(merged), changed, atol=3e-4)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("gpt2"))
def test_generates_the_same_tokens_as_merged(family):
    model = trained(add_lora(tiny.cached(family), LoraConfig(rank=3, rslora=True, dora=True)))
    ids = tiny.ids(2, 5)
    out, expected = (jaxllm.generate(m, ids, max_new_tokens=8) for m in (model, merge_lora(model)))
    np.testing.assert_array_equal(out.sequences, expected.sequences)


def test_the_base_stays_and_its_arrays_are_shared():
    base = tiny.cached("llama")
    before = jax.tree.structure(base)
    model = add_lora(base)
    assert jax.tree.structure(base) == before
    frozen = partition(model)[1]
    assert frozen.keys() == parameters(base).keys()
    assert all(x is frozen[path] for path, x in parameters(base).items())


def test_lora_a_depends_on_key_and_layer_only():
    base, path = tiny.cached("llama"), "backbone.stack.blocks.1.attn.q.lora_a"
    first, again, other = (parameters(add_lora(base, key=k))[path] for k in (0, 0, 1))
    single = parameters(add_lora(base, LoraConfig(targets="attn.q"), key=jax.random.key(0)))[path]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, single)
    assert np.abs(first - other).max() > 0.01
    assert 0.15 < np.abs(first).max() <= 32**-0.5


@pytest.mark.in_ci("gpt2-attn.(k|v)-layers1")
@pytest.mark.parametrize(
    ("family", "targets", "layers"),
    [
        ("gpt2", "c_attn", {"q": None, "k": "q", "v": "q"}),
        ("gpt2", "attn.(k|v)", {"k": None, "v": "k"}),
        ("gpt2", "attn.v", {"v": None}),
        ("bloom", "query_key_value", {"q": None, "k": "q", "v": "q"}),
        ("phi3", "qkv_proj", {"q": None, "k": "q", "v": "q"}),
        ("phi3", "gate_up_proj", {"gate": None, "up": "gate"}),
        ("llama", "[qkv]_proj", {"q": None, "k": None, "v": None}),
    ],
)
def test_parts_of_one_matrix_share_an_a(family, targets, layers):
    """One A is trained, which moves all parts; merged and separate logits are the same."""
    config = LoraConfig(rank=3, dora=True, targets=targets)
    model = trained(add_lora(tiny.cached(family), config))
    found = {path: layer.a_layer for path, layer in lora_layers(model).items() if ".1." in path}
    assert {path.rpartition(".")[2]: other for path, other in found.items()} == layers
    assert sum(path.endswith("lora_a") for path in partition(model)[0]) == 2 * sum(
        other is None for other in layers.values()
    )
    np.testing.assert_allclose(tiny.logits(merge_lora(model)), tiny.logits(model), atol=3e-4)
    values = parameters(model)
    for path, layer in lora_layers(model).items():
        module, _, name = path.rpartition(".")
        values[f"{path}.lora_a"] = values[f"{module}.{layer.a_layer or name}.lora_a"]
    copies = with_parameters(add_lora(tiny.cached(family), config, share_a=False), values)
    np.testing.assert_allclose(tiny.logits(copies), tiny.logits(model), atol=1e-5)


def test_a_layer_without_an_a_of_its_own_needs_its_module():
    model = add_lora(tiny.cached("gpt2"), LoraConfig(targets="c_attn"))
    layer = model.backbone.stack.blocks[0].attn.v
    with pytest.raises(InputError, match=r"parent: give the module that has this layer and 'q'"):
        layer.merged()


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        ("llama", "q_proj", "attn.q"),
        ("llama", "mlp.(up|gate)_proj", "mlp.(up|gate)"),
        ("llama", "layers.1.self_attn.v_proj", "blocks.1.attn.v"),
        ("gpt2", "c_attn", "attn.(q|k|v)"),
        ("gpt2", "attn.c_proj", "o"),
        ("t5", "q", "(attn|cross).q"),
        ("t5", "EncDecAttention.k", "cross.k"),
        ("t5", "wi_0", "gate"),
        ("llama", "all-linear", ".*(attn|mlp).*"),
    ],
)
def test_both_names_of_a_module_work(family, theirs, ours):
    actual = targets(tiny.cached(family), theirs)
    assert actual
    assert actual == targets(tiny.cached(family), ours)


@pytest.mark.in_ci("gpt2")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_linear_is_attention_and_mlp(family):
    model = tiny.cached(family)
    actual = targets(model, "all-linear")
    assert {path.split(".")[-2] for path in actual} <= {"attn", "cross", "mlp"}
    matrices = [p for p in parameters(model) if p.split(".")[-3:-2] and ".weight" in p]
    inside = {
        p.removesuffix(".weight") for p in matrices if p.split(".")[-3] in ("attn", "cross", "mlp")
    }
    assert set(actual) == inside


def test_a_pattern_without_a_match_lists_what_there_is():
    with pytest.raises(InputError, match=r"targets: 'q_prj' matches no module") as caught:
        add_lora(tiny.cached("llama"), LoraConfig(targets=("v_proj", "q_prj")))
    assert "backbone.stack.blocks.{i}.attn.q (model.layers.{i}.self_attn.q_proj)" in str(
        caught.value
    )
    with pytest.raises(InputError, match="modules_to_save: 'scores' matches no module"):
        add_lora(tiny.cached("llama"), LoraConfig(modules_to_save="scores"))
    with pytest.raises(InputError, match="trained whole"):
        add_lora(tiny.cached("llama"), LoraConfig(targets="lm_head", modules_to_save="lm_head"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", 2.0),
        ("rank", True),
        ("alpha", 0),
        ("alpha", float("nan")),
        ("alpha", "8"),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("targets", ()),
        ("targets", ("q_proj", 3)),
        ("targets", "(q_proj"),
        ("modules_to_save", 1),
        ("rslora", "yes"),
        ("dora", 1),
    ],
)
def test_config_errors_name_the_field(field, value):
    with pytest.raises(InputError, match=f"^{field}: "):
        LoraConfig(**{field: value})


def test_lora_twice_or_never():
    model = add_lora(tiny.cached("llama"))
    with pytest.raises(InputError, match="already"):
        add_lora(model)
    with pytest.raises(InputError, match="no LoRA"):
        merge_lora(tiny.cached("llama"))


def test_unmerged_is_not_saved_as_a_checkpoint(tmp_path):
    with pytest.raises(InputError, match="merge_lora"):
        jaxllm.save_hf(tmp_path, add_lora(tiny.cached("llama")))


@pytest.mark.ci
def test_merged_is_saved_and_loads(tmp_path):
    model = trained(add_lora(tiny.cached("llama")))
    jaxllm.save_hf(tmp_path, merge_lora(model))
    loaded, _ = jaxllm.load(tmp_path)
    np.testing.assert_allclose(tiny.logits(loaded), tiny.logits(model), atol=5e-5)


def test_partition():
    config = LoraConfig(targets="attn.q", dora=True, modules_to_save=("embed_tokens", "stack.norm"))
    model = add_lora(tiny.cached("llama"), config)
    actual, frozen = partition(model)
    path = "backbone.stack.blocks.{}.attn.q.{}"
    names = ("lora_a", "lora_b", "lora_magnitude")
    expected = {path.format(i, name) for i in (0, 1) for name in names}
    assert actual.keys() == expected | {"backbone.embed.weight", "backbone.stack.norm.weight"}
    assert actual.keys() | frozen.keys() == parameters(model).keys()
    assert not actual.keys() & frozen.keys()
    assert not is_trainable("backbone.stack.norm.weight", modules_to_save=("stack.norm",))


@pytest.mark.ci
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_score_of_a_classifier_is_trained_whole(family):
    base = tiny.make(family, architecture=CLASSIFIERS[family], num_labels=3, pad_token_id=0)
    model = add_lora(base)
    assert "score.weight" in partition(model)[0]
    assert "score" not in lora_layers(model)
    ids, labels = tiny.ids(), jnp.array([0, 2])
    np.testing.assert_allclose(model(ids).logits, base(ids).logits, atol=1e-5)
    merged = merge_lora(trained(model))
    assert np.abs(parameters(merged)["score.weight"] - parameters(base)["score.weight"]).max() > 0.1
    grads = parameters(jax.grad(lambda m: m(ids, labels=labels).loss)(model))
    assert np.abs(grads["score.weight"]).max() > 0


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("llama"))
def test_training_what_is_trainable_lowers_the_loss(family):
    model = add_lora(tiny.cached(family), LoraConfig(rank=4, dropout=0.1))
    ids = tiny.ids()

    def loss(params, frozen, **options):
        return with_parameters(model, params | frozen)(ids, labels=ids, **options).loss

    @jax.jit
    def step(params, frozen, key):
        grads = jax.grad(loss)(params, frozen, dropout_key=key)
        return jax.tree.map(lambda p, g: p - 0.02 * jnp.sign(g), params, grads)

    params, frozen = partition(model)
    before = loss(params, frozen)
    for i in range(8):
        params = step(params, frozen, jax.random.key(i))
    # Without dropout, whose draws change the loss of a step by a tenth.
    assert loss(params, frozen) < 0.9 * before


@pytest.mark.ci
def test_half_precision_keeps_its_dtypes():
    options = Options(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    base = tiny.make("llama", options=options)
    model = trained(add_lora(base, LoraConfig(dora=True)))
    assert {x.dtype for x in partition(model)[0].values()} == {jnp.dtype(jnp.float32)}
    merged = merge_lora(model)
    for path, x in parameters(merged).items():
        assert x.dtype == parameters(base)[path].dtype, path
    np.testing.assert_allclose(tiny.logits(merged), tiny.logits(model), atol=1.0)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PLAIN = {  # one layer, and no dropout but LoRA's
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1, "add_cross_attention": True, **NO_DROPOUT},
    "t5": {"num_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.0},
}
STATES = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)
PARTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
CROSS = ("cross.q", "cross.k", "cross.v", "cross.o")
LAYERS = [
    *(("llama", part) for part in (*PARTS, "mlp.gate", "lm_head")),
    *(pytest.param("gpt2", part, marks=pytest.mark.slow) for part in (*PARTS, *CROSS)),
    *(
        pytest.param("t5", part, marks=[] if part in CROSS else pytest.mark.slow)
        for part in (*PARTS, *CROSS, "mlp.gate", "lm_head")
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize(("family", "part"), LAYERS)
def test_the_dropout_key_reaches_every_layer(family, part):
    base = tiny.make(family, **PLAIN[family])
    model = trained(add_lora(base, LoraConfig(targets=part, dropout=0.5)))
    more = {"encoder_hidden_states": STATES} if family == "gpt2" else {}
    plain = tiny.logits(model, **more)
    first, again, other = (
        tiny.logits(model, dropout_key=jax.random.key(i), **more) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 1e-3
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.ci
def test_a_config_is_a_value():
    config = LoraConfig(targets=["q_proj"])
    assert config == LoraConfig(targets="q_proj")
    assert hash(config) == hash(dataclasses.replace(config, rank=8))
    layer = next(iter(lora_layers(add_lora(tiny.cached("llama"), config)).values()))
    assert isinstance(layer, LoraLinear)
