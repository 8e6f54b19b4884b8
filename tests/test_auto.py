"""transformers' names: Auto classes, methods of models, outputs, and renamed arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from hub_server import running_hub
from huggingface_hub import constants
from paths import DATA

import jaxllm
from jaxllm import models
from jaxllm.checkpoint.hub import resolve
from jaxllm.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weights import parameters
from jaxllm.tokenizers import AddedToken

REFERENCE = DATA / "reference"
FOLDERS = {"llama": "tiny-llama", "gpt2": "tiny-gpt2", "t5": "tiny-t5"}
CLASSES = {
    "llama": (jaxllm.auto.AutoModelForCausalLM, models.LlamaForCausalLM),
    "gpt2": (jaxllm.auto.AutoModelForCausalLM, models.GPT2LMHeadModel),
    "t5": (jaxllm.auto.AutoModelForSeq2SeqLM, models.T5ForConditionalGeneration),
}


def same_weights(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, parameters(a), parameters(b))


@pytest.mark.by_default("llama")
@pytest.mark.parametrize("family", FOLDERS)
def test_auto_and_family_classes_load_a_checkpoint(family):
    folder = REFERENCE / FOLDERS[family]
    expected, _ = jaxllm.load(folder, dtype="bfloat16")
    for each in CLASSES[family]:
        model = each.from_pretrained(folder, dtype="bfloat16")
        assert type(model) is type(expected)
        assert model.generation_config == expected.generation_config
        same_weights(model, expected)
        assert model.dtype == "bfloat16"
    assert model.num_parameters() == sum(x.size for x in parameters(expected).values())
    assert jaxllm.auto.AutoConfig.from_pretrained(folder) == model.config


@pytest.mark.ci
@pytest.mark.parametrize("family", FOLDERS)
def test_models_without_a_head_give_the_last_hidden_state(family, tmp_path):
    folder = REFERENCE / FOLDERS[family]
    model = jaxllm.auto.AutoModel.from_pretrained(folder)
    full, _ = jaxllm.load(folder)
    ids = tiny.ids()
    if family == "t5":
        expected = full(ids, decoder_input_ids=ids).encoder_last_hidden_state
    else:
        expected = full(ids, output_hidden_states=True).hidden_states[-1]
    np.testing.assert_array_equal(model(ids).last_hidden_state, expected)
    model.save_pretrained(tmp_path)
    same_weights(jaxllm.auto.AutoModel.from_pretrained(tmp_path), model)
    listed = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert listed == [type(model).__name__]


@pytest.mark.ci
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", *FOLDERS])
def test_models_of_a_config(family):
    config = tiny.make(family).config
    auto = jaxllm.auto.AutoModelForSeq2SeqLM if family == "t5" else jaxllm.auto.AutoModelForCausalLM
    model = auto.from_config(config, seed=3)
    same_weights(model, type(model).from_config(config, seed=3))
    with pytest.raises(UnsupportedError, match="splash is a kernel for TPUs"):
        type(model).from_config(config, attn_implementation="splash")
    first, other = model.embedding.weight, type(model).from_config(config, seed=4).embedding.weight
    assert not np.array_equal(first, other)
    assert jaxllm.auto.AutoModel.from_config(config).dtype == np.float32


def test_classifiers(tmp_path):
    tiny.make("llama", architecture="LlamaForSequenceClassification").save_pretrained(tmp_path)
    auto = jaxllm.auto.AutoModelForSequenceClassification
    model = auto.from_pretrained(tmp_path, config={"problem_type": "regression"})
    assert isinstance(model, models.LlamaForSequenceClassification)
    assert model.config.problem_type == "regression"


def test_a_config_needs_no_weights(tmp_path):
    config = json.loads((REFERENCE / "tiny-t5" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = jaxllm.auto.AutoConfig.from_pretrained(REFERENCE / "tiny-t5")
    assert jaxllm.auto.AutoConfig.from_pretrained(tmp_path) == expected
    with pytest.raises(ConfigError, match=r"config\.json: d_ff"):
        jaxllm.auto.AutoConfig.from_pretrained(tmp_path, d_ff=-1)


def test_a_whole_config_replaces_the_files(tmp_path):
    folder = REFERENCE / "tiny-gpt2"
    config = jaxllm.auto.AutoConfig.from_pretrained(folder, resid_pdrop=0.5)
    config = dataclasses.replace(config, attn_pdrop=0.25)
    model = models.GPT2LMHeadModel.from_pretrained(folder, config=config)
    assert model.config == config
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)  # replaces it
    assert jaxllm.auto.AutoConfig.from_pretrained(tmp_path) == config
    with pytest.raises(ConfigError, match="read by a GPT2Config, not a LlamaConfig"):
        models.GPT2LMHeadModel.from_pretrained(folder, config=models.LlamaConfig())


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_method_generates_like_the_function(family):
    model = tiny.cached(family)
    ids = tiny.ids()
    fields = {"max_new_tokens": 4, "do_sample": True, "output_scores": True}
    output = model.generate(ids, key=3, **fields)
    expected = jaxllm.generate(model, ids, key=3, **fields)
    assert list(output) == ["sequences", "scores", "lengths", "finish_reasons"]
    np.testing.assert_array_equal(output["sequences"], expected.sequences)
    assert output[0] is output.sequences


@pytest.mark.ci
def test_outputs_by_name_and_index():
    model = tiny.cached("gpt2")
    ids = tiny.ids()
    output = jax.jit(lambda model: model(ids, labels=ids, output_hidden_states=True))(model)
    assert list(output.keys()) == ["loss", "logits", "hidden_states"]
    assert output["logits"] is output[1] is output.logits
    loss, logits = output[:2]
    assert (loss, logits) == (output.loss, output.logits)
    assert len(output.to_tuple()) == len(output) == 3
    assert "attentions" not in output
    with pytest.raises(KeyError):
        output["attentions"]
    assert model(ids)[0].shape == (*ids.shape, 50)


CALLS = {
    "params": lambda model: model(tiny.ids(), params={}),
    "train": lambda model: model(tiny.ids(), train=True),
    "dropout_rng": lambda model: model(tiny.ids(), dropout_rng=jax.random.key(0)),
    "past_key_values": lambda model: model(tiny.ids(), past_key_values=()),
    "prng_key": lambda model: model.generate(tiny.ids(), prng_key=jax.random.key(0)),
    "_do_init": lambda model: type(model).from_pretrained("x", _do_init=False),
    "torch_dtype": lambda model: jaxllm.auto.AutoModelForCausalLM.from_pretrained(
        "x", torch_dtype=1
    ),
    "input_shape": lambda model: type(model).from_config(model.config, input_shape=(1, 1)),
    "do_lower_case": lambda m: jaxllm.auto.AutoTokenizer.from_pretrained("x", do_lower_case=True),
    "cache_dir": lambda model: jaxllm.auto.AutoConfig.from_pretrained("x", cache_dir="y"),
    "return_dict": lambda model: model(tiny.ids(), return_dict=False),
    "output_router_logits": lambda model: model(tiny.ids(), output_router_logits=True),
    "max_shard_size": lambda model: model.save_pretrained("x", max_shard_size="1GB"),
}


@pytest.mark.parametrize("name", CALLS)
def test_renamed_arguments_say_what_to_write(name):
    with pytest.raises(InputError, match=rf"has no `{name}`: \w+"):
        CALLS[name](tiny.cached("llama"))


@pytest.mark.ci
def test_arguments_that_ask_for_what_happens_anyway():
    folder = REFERENCE / "tiny-gpt2"
    off = {"cache_dir": None, "use_auth_token": None, "trust_remote_code": True}
    config = models.GPT2Config.from_pretrained(folder, **off)
    assert config == jaxllm.auto.AutoConfig.from_pretrained(folder)
    assert len(jaxllm.auto.AutoTokenizer.from_pretrained(folder, use_fast=False, **off)) == 512
    auto = jaxllm.auto.AutoModelForCausalLM
    model = auto.from_pretrained(folder, config=config, seed=42, from_pt=True, **off)
    same_weights(model, auto.from_pretrained(folder))
    same_weights(auto.from_config(config, seed=3, **off), auto.from_config(config, seed=3))
    output = model(tiny.ids(), train=False, return_dict=True, past_key_values=None)
    np.testing.assert_array_equal(output.logits, model(tiny.ids()).logits)
    with pytest.raises(ConfigError, match="tiny-gpt2: has a GPT2Config, not a T5Config"):
        models.T5Config.from_pretrained(folder)


def test_weights_are_not_set_from_outside():
    model = tiny.cached("gpt2")
    with pytest.raises(AttributeError, match="'params': a model is its own parameters"):
        model.params = {}
    with pytest.raises(InputError, match=r"train.*: give dropout_key="):
        model.train()
    with pytest.raises(AttributeError, match=r"'num_beams': model.generation_config has it"):
        model.config.num_beams  # noqa: B018


@pytest.mark.parametrize(
    ("name", "hint"),
    {
        "FlaxLogitsProcessorList": "jaxllm.generation.LogitsProcessorList",
        "T5ForConditionalGeneration": "jaxllm.models.T5ForConditionalGeneration",
        "T5TokenizerFast": "jaxllm.auto.AutoTokenizer",
        "BatchEncoding": "jaxllm.tokenizers.BatchEncoding",
        "FlaxAutoModelForCausalLM": "jaxllm.auto.AutoModelForCausalLM",
    }.items(),
)
def test_names_of_transformers_say_where_theirs_is(name, hint):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {hint}$"):
        getattr(jaxllm, name)
    assert not hasattr(jaxllm, "FlaxBertModel")


def test_fields_of_the_config_are_not_arguments():
    with pytest.raises(InputError, match=r'does not take resid_pdrop: .* config={"resid_pdrop"'):
        models.GPT2LMHeadModel.from_pretrained(REFERENCE / "tiny-gpt2", resid_pdrop=0.0)
    config = jaxllm.auto.AutoConfig.from_pretrained(REFERENCE / "tiny-gpt2")
    with pytest.raises(InputError, match=r"^AutoModelForCausalLM.from_pretrained\(\) does not"):
        jaxllm.auto.AutoModelForCausalLM.from_pretrained("x", resid_pdrop=0.0)
    with pytest.raises(InputError, match=r"use GPT2LMHeadModel.from_config\(config, seed=0\)"):
        models.GPT2LMHeadModel(config, seed=0)
    with pytest.raises(InputError, match="does not take rngs"):
        jaxllm.auto.AutoModelForCausalLM.from_config(config, rngs=0)


def test_configs_have_the_common_names_of_fields():
    gpt2 = jaxllm.auto.AutoConfig.from_pretrained(REFERENCE / "tiny-gpt2", revision="main")
    t5 = jaxllm.auto.AutoConfig.from_pretrained(REFERENCE / "tiny-t5")
    assert (gpt2.hidden_size, gpt2.num_hidden_layers) == (gpt2.n_embd, gpt2.n_layer)
    assert (t5.hidden_size, t5.num_attention_heads) == (t5.d_model, t5.num_heads)
    assert models.GPT2Config(**gpt2.to_dict()) == gpt2
    with pytest.raises(AttributeError, match=r"'id2label': jaxllm\.pipeline"):
        gpt2.id2label  # noqa: B018


def test_other_families_and_attributes():
    model = tiny.cached("t5")
    with pytest.raises(AttributeError, match=r"'params': a model is its own .* nnx.split"):
        model.params  # noqa: B018
    assert not hasattr(model, "nothing")
    with pytest.raises(UnsupportedError, match="'t5' has no CausalLM; it has T5ForCond"):
        jaxllm.auto.AutoModelForCausalLM.from_pretrained(REFERENCE / "tiny-t5")
    with pytest.raises(UnsupportedError, match="a T5Config has no CausalLM"):
        jaxllm.auto.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(UnsupportedError, match="has no MistralForCausalLM"):
        models.MistralForCausalLM.from_pretrained(REFERENCE / "tiny-llama")


def test_a_tokenizer_with_options(tmp_path):
    folder = REFERENCE / "tiny-gpt2"
    template = "{{ messages[0].content }}"
    options = {"padding_side": "left", "model_max_length": 7, "chat_template": template}
    pad = AddedToken("<|pad|>")
    tokenizer = jaxllm.auto.AutoTokenizer.from_pretrained(folder, pad_token=pad, **options)
    plain = jaxllm.auto.AutoTokenizer.from_pretrained(folder)
    assert (plain.padding_side, plain.chat_template) == ("right", None)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, jaxllm.auto.AutoTokenizer.from_pretrained(tmp_path)):
        assert {name: getattr(each, name) for name in options} == options
        assert (each.pad_token, each.pad_token_id) == ("<|pad|>", len(plain))
    with pytest.raises(
        UnsupportedError, match=r"add_prefix_space: without effect on a tokenizer\.json"
    ):
        jaxllm.auto.AutoTokenizer.from_pretrained(folder, add_prefix_space=True)


@pytest.mark.ci
def test_push_to_hub(monkeypatch, tmp_path):
    """The real client, and a Hub on this machine."""
    model, tokenizer = jaxllm.load(REFERENCE / "tiny-t5")
    with running_hub(token="secret") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(CheckpointError, match=r"'model': not uploaded to the Hub .*hf auth"):
            model.push_to_hub("model")
        monkeypatch.setenv("HF_TOKEN", "secret")
        options = {"tokenizer": tokenizer, "commit_message": "First"}
        assert model.push_to_hub("model", **options) == f"{hub.url}/me/model/commit/0"
    assert hub.messages == ["First"]
    for name, content in hub.files["me/model"].items():
        (tmp_path / name).write_bytes(content)
    again, tokenizer_again = jaxllm.load(tmp_path)
    same_weights(again, model)
    assert tokenizer_again.encode("a b") == tokenizer.encode("a b")


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_a_model_is_made_of_a_config_a_dict_or_a_path(name):
    path = REFERENCE / name
    config = jaxllm.auto.AutoConfig.from_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    made = [jaxllm.auto.AutoModelForCausalLM.from_config(each) for each in (config, raw, path)]
    assert made[0].config == made[1].config == made[2].config
    again = type(made[0]).from_config(raw)
    assert again.config.model_type == raw["model_type"]
    with pytest.raises(InputError, match=r"^config: expected a model's config, a dict or a path"):
        type(made[0]).from_config(3)


def test_a_callers_own_class_takes_the_config_of_its_backbone():
    class OwnModel(jaxllm.models.decoder_only.CausalLM):
        backbone_class = jaxllm.models.llama.LlamaBackbone

    raw = json.loads((REFERENCE / "tiny-llama" / "config.json").read_text())
    assert isinstance(OwnModel.from_config(raw), OwnModel)
    with pytest.raises(InputError, match=r"of a T5Config, which is for T5For\w+, T5EncoderModel$"):
        jaxllm.models.LlamaForCausalLM.from_config({"model_type": "mt5"})


def test_configs_know_their_model_type():
    for name, family in FAMILIES.items():
        raw = {"model_type": name}
        expected = "t5" if name == "mt5" else name
        assert family.config.from_dict(raw).model_type == expected


def test_the_bundled_model_has_a_name(smollm2_gguf, tmp_path, monkeypatch):
    assert resolve("smollm2") == smollm2_gguf
    assert jaxllm.auto.AutoConfig.from_pretrained("smollm2").model_type == "llama"
    with pytest.raises(InputError, match=r"revision='v2' needs a Hub id; smollm2 is bundled"):
        resolve("smollm2", "v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve("smollm2") == Path("smollm2")  # a folder of this name goes first
