"""transformers' Flax classes over jaxllm's models: trees, calls and scripts as they stand.

The reference is transformers 4.57's own (data/flax_classes/make_cases.py).
"""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import jax_utils, traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot
from paths import DATA

from jaxllm import flax_classes
from jaxllm.errors import InputError
from jaxllm.flax_classes.base import dropout_key

FILE = json.loads((DATA / "flax_classes" / "cases.json").read_text(encoding="utf-8"))
IDS = np.array(FILE["ids"])
CASES = {f"{case['folder']} {case['class']}": case for case in FILE["cases"]}
GENERATING = [name for name, case in CASES.items() if "greedy" in case]


def loaded(name: str, **options):
    case = CASES[name]
    folder = DATA / "reference" / case["folder"]
    return getattr(flax_classes, case["class"]).from_pretrained(folder, **options), case


def weighted(x) -> float:
    values = np.asarray(x, np.float64).ravel()
    return float(values @ np.cos(np.arange(values.size)))


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_params_and_outputs_match_transformers(name):
    model, case = loaded(name, from_pt=True)
    flat = traverse_util.flatten_dict(model.params)
    tree = {"/".join(path): [list(x.shape), weighted(x)] for path, x in flat.items()}
    assert type(model).__name__ == case["class"]
    assert {path: shape for path, (shape, _) in tree.items()} == {
        path: shape for path, (shape, _) in case["tree"].items()
    }
    for path, (_, value) in case["tree"].items():
        np.testing.assert_allclose(tree[path][1], value, rtol=1e-6, atol=1e-6, err_msg=path)
    inputs = (IDS, np.ones_like(IDS))
    args = (*inputs, IDS[:, :4]) if "Conditional" in name else inputs
    forward = jax.jit(lambda params: model(*args, params=params)[0])
    np.testing.assert_allclose(
        forward(model.params)[:, -1, :32], case["last"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.ci
@pytest.mark.parametrize("name", GENERATING)
def test_sequences_match_transformers(name):
    model, case = loaded(name)
    assert model.generate(IDS).sequences.tolist() == case["greedy"]
    beams = model.generate(IDS, num_beams=3, max_length=12, params=model.params)
    assert beams.sequences.tolist() == case["beams"]
    assert beams.scores.shape == (2,)


def test_the_tree_of_gemma():
    """Names of transformers 4.57's FlaxGemmaForCausalLM, whose norms have a `weight`."""
    net = tiny.make("gemma", num_hidden_layers=1)
    model = flax_classes.FlaxGemmaForCausalLM.from_model(net)
    layer = model.params["model"]["layers"]["0"]
    np.testing.assert_array_equal(
        layer["self_attn"]["q_proj"]["kernel"], net.backbone.stack.blocks[0].attn.q.weight[...].T
    )
    assert layer["input_layernorm"]["weight"].shape == (32,)
    assert model.params["model"]["embed_tokens"]["embedding"].shape == (50, 32)
    np.testing.assert_array_equal(model(tiny.ids()).logits, tiny.logits(net))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FlaxBartModel", r"take FlaxBartForConditionalGeneration.*decoder_hidden_states\[-1\]"),
        ("FlaxMarianModel", "take FlaxMarianMTModel"),
        ("FlaxBartForSequenceClassification", "of transformers' Flax classes jaxllm has FlaxAuto"),
        ("BertConfig", r"no attribute 'BertConfig'$"),
    ],
)
def test_names_that_are_not_here(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(flax_classes, name)


def test_dropout_is_for_training_only():
    key = jax.random.key(0)
    assert dropout_key(key, train=True) is key
    assert dropout_key(key, train=False) is None


class Unnamed(flax_classes.FlaxPreTrainedModel):
    """A script's own class, of no class of jaxllm."""


def test_wrong_calls_are_named():
    config = flax_classes.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    model = flax_classes.FlaxAutoModelForCausalLM.from_config(config)
    assert type(model) is flax_classes.FlaxGPT2LMHeadModel  # `Unnamed` changes nothing
    for message, options in {
        "max_length": {"max_length": "x"},
        "generation_config: expected a GenerationConfig or a dict": {"generation_config": 3},
    }.items():
        with pytest.raises(InputError, match=message):
            model.generate(IDS % 50, **options)
    with pytest.raises(InputError, match="input_ids: given twice, by position and by name"):
        model(IDS % 50, input_ids=IDS % 50)
    with pytest.raises(InputError, match="save_directory: expected a path, found 3"):
        model.save_pretrained(3)


@pytest.mark.ci
def test_results_have_all_columns():
    model, _ = loaded("tiny-gpt2 FlaxGPT2LMHeadModel")
    greedy = model.generate(IDS, max_length=9).sequences
    ends = int(greedy[0, 7])
    output = model.generate(IDS[:1], max_length=9, eos_token_id=ends, pad_token_id=3)
    assert output.sequences.tolist() == [[*greedy[0, :8].tolist(), 3]]


@pytest.mark.ci
def test_parameters_apart():
    name = "tiny-gpt2 FlaxGPT2LMHeadModel"
    (model, params), _ = loaded(name, _do_init=False)
    with pytest.raises(InputError, match="_do_init=False: give params="):
        model(IDS)
    with pytest.raises(InputError, match="_do_init=False: give params="):
        model.params  # noqa: B018
    expected = model(IDS, params=params).logits
    model.params = params
    np.testing.assert_array_equal(model(IDS).logits, expected)
    assert model(IDS, return_dict=False)[0].shape == expected.shape
    shapes = jax.eval_shape(partial(model.init_weights, input_shape=(1, 1)), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    assert model.to_bf16(params)["transformer"]["ln_f"]["scale"].dtype == jnp.bfloat16
    with pytest.raises(AttributeError, match=r"'init_cache': use model\.module\.init_cache"):
        model.init_cache(2, 8)
    mask = jax.tree_util.tree_map_with_path(lambda path, x: "ln_f" not in str(path), params)
    final = model.to_bf16(params, mask)["transformer"]
    assert (final["ln_f"]["scale"].dtype, final["wte"]["embedding"].dtype) == ("f4", jnp.bfloat16)
    with pytest.raises(InputError, match="train=True: give dropout_rng"):
        model(IDS, train=True)
    with pytest.raises(InputError, match=r"params: missing: .*\(4 in all\)"):
        model.params = {"transformer": {"h": params["transformer"]["h"], "x": IDS}}
    wrong = jax.tree.map(lambda x: x[:1], params)
    with pytest.raises(InputError, match="expected"):
        model(IDS, params=wrong)
    model = flax_classes.FlaxGPT2LMHeadModel(model.config, seed=3, _do_init=False)
    assert model(IDS, params=params).logits.shape == expected.shape


class TrainState(train_state.TrainState):
    dropout_rng: jax.Array


@pytest.mark.ci
def test_training_as_in_the_examples(tmp_path):
    """The steps of run_summarization_flax.py, in their own words."""
    folder = DATA / "reference" / "tiny-t5"
    model = flax_classes.FlaxAutoModelForSeq2SeqLM.from_pretrained(folder, seed=0)
    shift = getattr(__import__(model.__module__, fromlist=["_"]), "shift_tokens_right")  # noqa: B009
    labels = IDS[:, :5]
    decoder_ids = shift(jnp.array(labels), model.config.pad_token_id, 0)
    batch = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "labels": labels}
    batch |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": np.ones_like(labels)}

    def decay_mask_fn(params):
        flat = traverse_util.flatten_dict(params)
        norms = {p for p in flat if "layer_norm" in p[-2]}
        assert len(norms) == sum(path.endswith("norm/weight") for path in tree)
        return traverse_util.unflatten_dict({p: p not in norms for p in flat})

    tree = CASES["tiny-t5 FlaxT5ForConditionalGeneration"]["tree"]
    state = TrainState.create(
        apply_fn=model.__call__,
        params=model.params,
        tx=optax.adamw(3e-3, mask=decay_mask_fn),
        dropout_rng=jax.random.PRNGKey(0),
    )

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        return state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng), loss

    def generate_step(params, batch):
        model.params = params
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return model.generate(ids, attention_mask=mask, max_length=8, num_beams=2).sequences

    devices = {"devices": jax.local_devices()[:1]}
    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,), **devices)
    state = jax_utils.replicate(state, jax.local_devices()[:1]).replace(
        dropout_rng=jax.random.split(state.dropout_rng, 1)
    )
    sharded = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
    losses = []
    for _ in range(6):
        state, loss = p_train_step(state, dict(sharded))
        losses.append(float(loss[0]))
    assert losses[-1] < 0.8 * losses[0]
    generated = jax.pmap(generate_step, "batch", **devices)(state.params, sharded)
    params = jax.device_get(jax_utils.unreplicate(state.params))
    model.save_pretrained(tmp_path, params=params, push_to_hub=False, commit_message="x")
    again = flax_classes.FlaxT5ForConditionalGeneration.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    again = again.generate(IDS, max_length=8, num_beams=2).sequences
    np.testing.assert_array_equal(again, generated[0])


@pytest.mark.ci
def test_an_encoder_and_a_decoder_apart():
    model, _ = loaded("tiny-t5 FlaxT5ForConditionalGeneration")
    whole = model(IDS, np.ones_like(IDS), IDS[:, :4])
    encoded = model.encode(IDS, np.ones_like(IDS), return_dict=True)
    decoded = model.decode(IDS[:, :4], encoded, np.ones_like(IDS))
    np.testing.assert_allclose(decoded.logits, whole.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_params_are_those_of_the_moment():
    model, _ = loaded("tiny-gpt2 FlaxGPT2LMHeadModel")
    first = model(IDS).logits
    jax.jit(lambda ids: model(ids, params=model.params).logits)(IDS)  # asked for under a trace
    model.params["transformer"]["ln_f"]["bias"] = model.params["transformer"]["ln_f"]["bias"] + 1
    changed = model(IDS).logits
    assert np.abs(changed - first).max() > 0.1
    np.testing.assert_array_equal(model(IDS, params=model.params).logits, changed)
    assert model.module(IDS).logits.tolist() == changed.tolist()
