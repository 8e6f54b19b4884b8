"""Wrong values in calls from Python: an InputError with the argument and its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from paths import DATA

import jaxllm
from jaxllm import models
from jaxllm.errors import ConfigError, InputError, JaxLLMError, UnsupportedError
from jaxllm.generation.processors.grammar import regex
from jaxllm.training import labels

GPT2, T5 = (DATA / "reference" / name for name in ("tiny-gpt2", "tiny-t5"))


@pytest.fixture(scope="module")
def tokenizer():
    return jaxllm.auto.AutoTokenizer.from_pretrained(T5)


MODEL_CALLS = {
    "recipe: expected a recipe, its fields, its file": lambda model: jaxllm.train(5),
    "labels: patterns: expected a dictionary such as": lambda m: labels(m, lambda path: "train"),
    r"labels: patterns: .*, found \['lora_'\] \(list\)": lambda model: labels(model, ["lora_"]),
    "unknown generation field `seed`; generate\\(\\) takes key=": lambda m: jaxllm.generate(
        m, [[5]], seed=3
    ),
    "unknown generation field `key`; generate_texts\\(\\) and .* seed=": lambda model: (
        jaxllm.BatchGenerator(model, None, key=3)
    ),
    "prompts: texts need a tokenizer": lambda model: jaxllm.score(model, ["a"], ["b"]),
    "config: expected a config": lambda model: jaxllm.load(GPT2, config=3),
    "config: expected names of fields, found 3": lambda model: jaxllm.load(GPT2, config={3: 3}),
    "architecture: expected a class": lambda model: jaxllm.load(GPT2, architecture=[]),
    "attn_implementation: expected": lambda m: jaxllm.load(GPT2, attn_implementation=np.zeros(0)),
    "quantize: expected a name": lambda model: jaxllm.load(GPT2, quantize=[]),
    "remat: expected True, False or a name, found 3": lambda m: jaxllm.load(
        GPT2, remat=np.int64(3)
    ),
    "allow_nonfinite: expected": lambda model: jaxllm.load(GPT2, allow_nonfinite=np.zeros(0)),
    "progress: expected a function": lambda model: jaxllm.load(GPT2, progress=3),
    "folder: expected a path, found None": lambda model: model.save_pretrained(None),
    "model: expected a model, found 3": lambda model: jaxllm.save_hf("x", 3),
    "tokenizer: expected a tokenizer": lambda model: jaxllm.save_hf("x", model, "tok"),
    "max_shard_bytes: expected .*1GB": lambda m: jaxllm.save_hf("x", m, max_shard_bytes="1GB"),
    "folder: expected a path, found 3": lambda model: jaxllm.save_orbax(3, model),
    "model: expected a model, found tok": lambda model: jaxllm.save_orbax("x", "tok"),
    "folder: expected a path": lambda model: jaxllm.load_orbax(None),
    "size: expected an integer, found a": lambda model: model.resize_token_embeddings("a"),
    "config: T5Enc.* of a GPT2Config, which is for GPT2LMHeadModel": lambda m: (
        jaxllm.models.T5EncoderModel.from_config(m.config)
    ),
    "seed: expected an integer": lambda m: type(m).from_config(m.config, seed="a"),
    "dtype, param_dtype: .*zz": lambda m: type(m).from_config(m.config, dtype="zz"),
    "config: expected a config.json object": lambda model: models.model_spec("x"),
    "source: expected a path, found 3": lambda model: jaxllm.planning.abstract_model(3),
    "device: expected a device": lambda model: jaxllm.planning.abstract_model(GPT2, device="cpu"),
    "mesh: ": lambda model: jaxllm.planning.abstract_model(GPT2, mesh="x"),
    "tokenizer: expected a tok.* 3": lambda model: jaxllm.BatchGenerator(model, 3),
    "tokenizer: expected a tok": lambda model: jaxllm.serve.AsyncEngine(model, 3),
    "rows: ": lambda m: jaxllm.BatchGenerator(m).generate(None),
    "announce: expected a function": lambda m: jaxllm.BatchGenerator(m, announce=True),
    "generation_config: .*names of fields": lambda m: m.generate([[1]], generation_config={1: 2}),
    "begin_suppress_tokens": lambda m: m.generate([[1]], begin_suppress_tokens=np.array(None)),
    "top_p.* number in": lambda m: m.generate([[1]], top_p=jax.random.key(0)),
    "bos_token_id.* 99 is not in the vocab": lambda m: m.generate(bos_token_id=99),
    "`constraints` names token 99": lambda m: m.generate(
        [[1]], num_beams=2, constraints=[jaxllm.generation.PhrasalConstraint([99])]
    ),
    "inputs_embeds: expected floats, found int": lambda m: m.generate(
        inputs_embeds=np.zeros((1, 3, 32), int)
    ),
    "inputs_embeds: rows of different": lambda m: m.generate(inputs_embeds=[[1, 2], [3]]),
    "encoder_hidden_states: expected a non-empty": lambda m: m.generate(
        [[1]], encoder_hidden_states=3
    ),
    "row_ids: rows of different lengths": lambda m: m.generate([[1]], row_ids=[[1], [1, 2]]),
    r"row_ids: .* found \[-1\]": lambda m: m.generate([[1]], row_ids=[-1]),
    "key: a seed is from 0 .* found -1": lambda m: m.generate([[1]], key=-1),
    "return_past_key_values: expected True": lambda m: m.generate(
        [[1]], return_past_key_values="no"
    ),
    r"logits_processor: <lambda> must be .* are \(a, b\)": lambda m: m.generate(
        [[1]], logits_processor=[lambda a, b: b]
    ),
    "logits_processor: TemperatureLogitsWarper must be a function": lambda m: m.generate(
        [[1]], logits_processor=[jaxllm.generation.TemperatureLogitsWarper]
    ),
    r"stopping_criteria: <lambda> must be .* are \(a, b\)": lambda m: m.generate(
        [[1]], stopping_criteria=[lambda a, b: True]
    ),
    "attention_mask: expected 0 and 1 only, found 2": lambda m: m.generate(
        [[1]], attention_mask=[[2]]
    ),
    r"attention_mask\[1\]: expected shape \(2,\), found": lambda m: jaxllm.score(
        m, [[1], [1, 2]], [[1], [1]], attention_mask=[[1], [1]]
    ),
    r"prompts\[0\]: rows of different": lambda m: jaxllm.score(m, [[[1], [1, 2]]], [[1]]),
    "input_ids: expected an array of numbers": lambda m: m(jax.random.key(0)),
    "key: expected": lambda m: m.generate([[1]], do_sample=True, key=[1, [2]]),
    "revision: expected a branch": lambda m: jaxllm.load(GPT2, revision=3),
    "remat: expected True, False, .* found 'yes'": lambda m: jaxllm.load(GPT2, remat="yes"),
    "path_or_hub_id: .* integer of thousands of digits": lambda m: jaxllm.load(10**5000),
    "path_or_hub_id: expected": lambda m: jaxllm.auto.AutoConfig.from_pretrained(10**5000),
    "scores: expected a list": lambda m: jaxllm.generation.compute_transition_scores([[1]], None),
    "scores: expected an array of 3": lambda m: jaxllm.generation.compute_transition_scores(
        [[1]], ["x"]
    ),
    "batch: expected an integer": lambda m: m.init_cache("a", 4),
    "capacity: expected an integer": lambda m: m.init_cache(1, -4),
    "cache: expected what init_cache returns": lambda m: m([[1]], cache=3),
    "topology: expected a name": lambda m: jaxllm.plan(GPT2, 3),
    "dropout_key: expected": lambda m: m([[1]], dropout_key=True),
    "output_attentions: expected": lambda m: m([[1]], output_attentions=[]),
    "logits_to_keep: .* integer of thousands": lambda m: m([[1]], logits_to_keep=10**5000),
    "task: expected a name": lambda m: jaxllm.pipeline([], GPT2),
    "data=.* integer of thousands of digits": lambda m: jaxllm.make_mesh(data=10**5000),
    "on: expected True or False": lambda m: jaxllm.set_progress("x"),
    "save_directory: expected": lambda m: jaxllm.GenerationConfig().save_pretrained(3),
}


@pytest.mark.in_ci("logits_to_keep: .* integer of thousands")
@pytest.mark.parametrize("message", MODEL_CALLS)
def test_of_models(message: str) -> None:
    with pytest.raises(InputError, match=message) as failure:
        MODEL_CALLS[message](tiny.cached("gpt2"))
    assert len(str(failure.value)) < 500


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (models.LlamaConfig, {"hidden_size": "a"}, "hidden_size: expected int, found 'a'"),
        (models.LlamaConfig, {"rope": 3}, "rope: expected Rope, found 3"),
        (models.GPT2Config, {"n_layer": None}, "n_layer: expected int, found None"),
        (models.GPT2Config, {"n_layer": 2**40}, "n_layer: expected 1 to 4096"),
        (models.GPT2Config, {"n_embd": 64, "n_head": 3}, "n_embd: 64 is not a multiple of n_head"),
        (models.T5Config, {"dropout_rate": 1.5}, "dropout_rate: expected 0 <= rate < 1"),
    ],
)
def test_of_configs(config_class: Any, fields: dict[str, Any], message: str) -> None:
    """Of types where the config is made, of values where a model is."""
    architectures = {"LlamaConfig": "LlamaForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
    name = architectures.get(config_class.__name__, "T5ForConditionalGeneration")
    with pytest.raises(ConfigError, match=message):
        getattr(models, name).from_config(config_class(**fields))


def test_lists_and_numpy_numbers_in_configs() -> None:
    """Static fields of a program need values that compare and hash."""
    config = models.T5Config(
        eos_token_id=[1, np.int64(2)],  # pyright: ignore[reportArgumentType]
        dropout_rate=np.float32(0.5),  # pyright: ignore[reportArgumentType]
    )
    assert config == models.T5Config(eos_token_id=(1, 2), dropout_rate=0.5)
    assert (type(config.dropout_rate), type(config.eos_token_ids[1])) == (float, int)


@pytest.mark.parametrize("value", [np.ones(3), jnp.ones(3)])
def test_an_array_as_a_setting_without_effect(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"`generation_kwargs`=.* is not supported"):
        tiny.cached("gpt2").generate([[1]], generation_kwargs=value)


def test_an_empty_array_as_a_setting() -> None:
    for name in ("pad_token_id", "do_sample", "stop_strings"):
        with pytest.raises(ConfigError, match=name):
            jaxllm.GenerationConfig.from_dict({name: np.zeros(0)})


def test_bytes_as_a_model() -> None:
    for call in (lambda: jaxllm.BatchGenerator(b"x"), lambda: jaxllm.generate(b"x", [[1]])):
        with pytest.raises(UnsupportedError, match="bytes has no language-model head"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda path: tiny.cached("gpt2").save_pretrained(path),
        jaxllm.load,
        jaxllm.load_orbax,
        jaxllm.planning.abstract_model,
        jaxllm.auto.AutoTokenizer.from_pretrained,
    ],
)
def test_a_long_path_of_a_model(call: Callable[[str], object]) -> None:
    with pytest.raises(JaxLLMError) as failure:
        call("x" * 5000)
    assert len(str(failure.value)) <= 500


TOKENIZER_CALLS = {
    "new_tokens: expected a list, found None": lambda t: t.add_tokens(None),
    "tokens: expected a dict of tokens": lambda t: t.add_special_tokens(3),
    "additional_special_tokens: expected a list": lambda t: t.add_special_tokens(
        {"additional_special_tokens": 3}
    ),
    "input_ids: expected a list, found 3": lambda t: t.pad({"input_ids": 3}),
    "1 rows of 1000000000000 tokens": lambda t: t("a", padding=True, pad_to_multiple_of=10**12),
    "2 rows of 1000000000000 tokens": lambda t: t(
        ["a", "b"], padding="max_length", max_length=10**12
    ),
    "save_directory: expected a path": lambda t: t.save_pretrained(None),
    "folder: expected a path": lambda t: t.save(np.zeros(3)),
    "index: expected a token id, found None": lambda t: t.id_to_token(None),
    "token: expected a str": lambda t: t.token_to_id([]),
    "rows: expected a list of lists": lambda t: t.batch_decode(np.array(None)),
    "tokens: expected a list": lambda t: t.convert_tokens_to_ids(np.array(None)),
    "rows: expected lists": lambda t: t.pad(np.array(None)),
    "rows: expected lists .* integer of thousands": lambda t: t.pad([10**5000]),
    "unpaired surrogate": lambda t: t.add_tokens("\ud800"),
    "add_tokens: 'x.* has more than 256 bytes": lambda t: t.add_tokens("x" * 257),
    "add_special_tokens: .* found no": lambda t: t.encode("a", add_special_tokens="no"),
    "skip_special_tokens: .* found no": lambda t: t.decode([1], skip_special_tokens="no"),
    "return_attention_mask: .* found no": lambda t: t("a", return_attention_mask="no"),
    "truncation: expected": lambda t: t("a", truncation=np.zeros(0)),
    "return_tensors: expected": lambda t: t("a", return_tensors=10**5000),
}


@pytest.mark.parametrize("message", TOKENIZER_CALLS)
def test_of_tokenizers(message: str, tokenizer) -> None:
    with pytest.raises(InputError, match=message):
        TOKENIZER_CALLS[message](tokenizer)


def test_a_long_token_with_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of Tokenizer may have longer tokens than jaxllm reads from files."""
    tokenizer = jaxllm.auto.AutoTokenizer.from_pretrained(T5)
    tokens = [*tokenizer.token_bytes()[:-1], b"x" * 2000]
    monkeypatch.setattr(tokenizer, "token_bytes", lambda: tokens)
    with pytest.raises(InputError, match="a token of 2000 bytes, but a grammar takes at most 1024"):
        regex("a+", tokenizer)


def test_of_a_pipeline() -> None:
    pipe = jaxllm.pipeline("text2text-generation", T5)
    for inputs in (None, 3):
        with pytest.raises(InputError, match=f"inputs: expected a list, found {inputs}"):
            pipe(inputs)
    with pytest.raises(InputError, match=r"inputs\[1\]: expected a string, found 3"):
        pipe(["a", 3])
    with pytest.raises(InputError, match="batch_size: expected an integer of 1 or more, found 0"):
        pipe("a", batch_size=0)


def test_encoder_outputs() -> None:
    for value in ([], "abc", [[1, 2], [3]], np.zeros((1, 3, 32), int), np.zeros((1, 3))):
        with pytest.raises(InputError, match="encoder_outputs: "):
            tiny.cached("t5").generate(encoder_outputs=value)


def test_an_array_of_phrases_in_a_row_of_a_batch() -> None:
    """An error of a row is in its result, and phrases may be an array."""
    row = {"input_ids": [3], "max_new_tokens": 2, "num_beams": 2, "eos_token_id": None}
    rows = [{**row, "force_words_ids": np.array(x)} for x in ([[7]], [7])]
    forced, wrong = jaxllm.BatchGenerator(tiny.cached("gpt2"), slots=2).generate(rows)
    assert 7 in forced.output_ids[0]
    assert "`force_words_ids` must be a non-empty list of phrases" in str(wrong.error)
