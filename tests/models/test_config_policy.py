"""Keys of real config.json files that are no obstacle, and errors for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from jaxllm.common.errors import ConfigError, JaxLLMError, UnsupportedError
from jaxllm.models import (
    GPT2Config,
    LlamaConfig,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from jaxllm.models.registry import model_spec

# Keys of 94 config.json files of public GitHub repositories, of one quoted in a report and of one
# written by hand, that are not fields of our configs, with a value that occurs:
# (repository, number of files, model_type, class, keys).
PLAIN = {"use_cache": True, "transformers_version": "4.28.1"}
SAVED = {**PLAIN, "torch_dtype": "float32"}
SUMMARY = {"summary_type": "cls_index", "summary_use_proj": True, "summary_proj_to_labels": True}
SUMMARY |= {"summary_activation": None, "summary_first_dropout": 0.1, "n_ctx": 1024}
TASKS = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
LLAMA_BY_HAND = ("llama", "LLaMAForCausalLM", {**PLAIN, "max_sequence_length": 1024})
T5_SAVED = {**SAVED, "_name_or_path": "t5-small", "is_encoder_decoder": True, "n_positions": 512}
T5_SAVED |= {"output_past": True, "classifier_dropout": 0.0, **TASKS}
READ = [
    ("Guitaricet/relora", 15, *LLAMA_BY_HAND),
    ("jiaweizzhao/GaLore", 6, *LLAMA_BY_HAND),
    ("KamikaziZen/RunLoRA", 5, *LLAMA_BY_HAND),
    ("SafeAILab/EAGLE", 6, "llama", "LlamaForCausalLM", {**SAVED, "max_sequence_length": 4096}),
    ("FOUNDATION-AI-BASED/OLLAMINI-MODELS-DOWNLOAD-REPO", 1, "llama", "LlamaForCausalLM",
     {"use_cache": True, "unk_token_id": 1}),
    ("NT3RN/BanglaLLM", 1, "llama", "LlamaForCausalLM", {"use_cache": False, "dtype": "float32"}),
    ("tejashwinn/repo-for-file-transfer", 1, "llama", "LlamaForCausalLM",
     {**SAVED, "_name_or_path": "/mnt/tinyllama-2T-sft-full", "use_cache": False}),
    ("hashvibe007/smollm2", 1, "llama", "LlamaForCausalLM", SAVED),
    ("1049224370/haihua_2021", 1, "gpt2", "GPT2LMHeadModel",
     {"n_ctx": 1024, "output_past": True, "tokenizer_class": "BertTokenizer", **TASKS}),
    ("AbisoyeOnanuga/beebe", 1, "gpt2", "GPT2LMHeadModel", {**SUMMARY, **TASKS}),
    ("952994221/NLP-Couplet-GPT2", 1, "gpt2", None,
     {**SUMMARY, "finetuning_task": None, "output_attentions": False, "torchscript": False,
      "output_hidden_states": False, "pruned_heads": {}, "use_bfloat16": False}),
    ("husam6101/PiVoice", 1, "gpt2", "GPT2ForSequenceClassification",
     {**SUMMARY, **SAVED, **TASKS, "_name_or_path": "gpt2"}),
    ("reagan13/thesis-2025", 1, "gpt2", "GPT2LMHeadModel",
     {**SUMMARY, **SAVED, **TASKS, "_num_labels": 1}),
    ("xu737/PeFAD, Shubham2376G/FAQ_generator", 2, "gpt2", "GPT2LMHeadModel", {**SUMMARY, **SAVED}),
    ("learningexample/xformer, rsc1102/RVV-DL-Final-Project, canunj/Auto-BoardGame", 3, "t5",
     "T5ForConditionalGeneration", T5_SAVED),
    ("peytongolden/CODET-5-SMALL-Fine-Tuning", 1, "t5", "T5ForConditionalGeneration",
     {**T5_SAVED, "gradient_checkpointing": False}),
    ("LavenderCheng/LLM-Project---Team-5", 1, "gpt2", "GPT2LMHeadModel",
     {**SUMMARY, **SAVED, "bos_token": 0, "eos_token": 2}),
    ("aws-neuron/neuronx-distributed", 1, "llama", "LlamaForCausalLM",
     {**SAVED, "sequence_parallel_enabled": False, "move_model_to_device": True}),
    ("a config.json in a report of ALI Studio", 1, "llama", "LlamaForCausalLM",
     {"use_cache": True, "use_sdpa": True, "torch_dtype": "float32"}),
    ("laddge/gf-ai", 1, "t5", "T5ForConditionalGeneration", {**SAVED, "eos_token_ids": [1]}),
    ("written by hand", 1, "qwen2", "Qwen2ForCausalLM",
     {**SAVED, "pretraining_tp": 1, "hidden_dropout_prob": 0.1, "attn_pdrop": 0.1}),
]  # fmt: skip
DFLASH = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16}
DFLASH |= {"dflash_config": {"mask_token_id": 151669}, "num_target_layers": 36}
REFUSED = [
    ("SafeAILab/EAGLE", 1, "llama", "LlamaForCausalLM", {"draft_vocab_size": 32000}),
    ("sgl-project/SpecForge", 25, "llama", "LlamaForCausalLMEagle3", {"draft_vocab_size": 32000}),
    ("sgl-project/SpecForge", 1, "qwen2", "LlamaForCausalLMEagle3", {"draft_vocab_size": 32000}),
    ("sgl-project/SpecForge", 17, "qwen3", "DFlashDraftModel", DFLASH),
]


def config_of(row: tuple[str, int, str, str | None, dict[str, Any]]) -> dict[str, Any]:
    _, _, family, architecture, keys = row
    return {**tiny.CONFIGS[family], "architectures": architecture and [architecture], **keys}


@pytest.mark.parametrize("row", READ, ids=lambda row: row[0].split(",")[0])
def test_keys_of_real_files_are_no_obstacle(row):
    family = row[2]
    read = model_spec(config_of(row))
    assert read.config == model_spec(tiny.CONFIGS[family]).config
    assert read.architecture == (row[3] or "GPT2LMHeadModel").replace("LLaMA", "Llama")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_name_of_the_rotary_embedding_is_no_obstacle(family):
    """The plain one of four variants of shikhar-srivastava/multilingual-eleuther has it."""
    plain = tiny.CONFIGS[family]
    named = {**plain, "position_embedding_type": "rope"}
    assert model_spec(named).config == model_spec(plain).config
    with pytest.raises(UnsupportedError, match=r"position_embedding_type \(learned\)"):
        model_spec({**plain, "position_embedding_type": "learned"})


def test_qwens_windows_that_are_off_are_no_obstacle_for_llama():
    """Qwen models whose files were converted to Llama's have them."""
    windows = {"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": False}
    plain = tiny.CONFIGS["llama"]
    assert model_spec({**plain, **windows}).config == model_spec(plain).config
    with pytest.raises(UnsupportedError, match=r"use_sliding_window.*sliding_window"):
        model_spec({**plain, "use_sliding_window": True, "sliding_window": 32768})


def test_the_class_of_a_file_without_a_model_type_decides():
    """As in Bala-Yarabikki/Textgeneration_GPT2; and a class is a name as well as a list of one."""
    plain = tiny.CONFIGS["gpt2"]
    for classes in (["GPT2LMHeadModel"], ["GPT2Model"]):
        read = model_spec({**plain, "model_type": None, "architectures": classes})
        assert read == model_spec({**plain, "architectures": classes[0]})
    with pytest.raises(ConfigError, match="model_type: expected one of"):
        model_spec({**plain, "model_type": None, "architectures": ["BertModel"]})


SCALED = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "equal"),
    [
        ({"rope_scaling": {**SCALED, "finetuned": True}}, {"rope_scaling": SCALED}),
        ({"rope_scaling": {**SCALED, "alpha": None}}, {"rope_scaling": SCALED}),
        ({"rope_scaling": {"rope_type": "default", "factor": 1.0}}, {}),
        ({"layer_types": ["full_attention"] * 2, "max_window_layers": 2}, {}),
    ],
)
def test_rope_and_windows_that_change_nothing(keys, equal):
    plain = tiny.CONFIGS["llama"]
    assert model_spec({**plain, **keys}).config == model_spec({**plain, **equal}).config


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        {"rope_scaling": {**SCALED, "alpha": 1000.0}},
        {"rope_scaling": {**SCALED, "alpha": False}},
        {"rope_scaling": {**SCALED, "_x": 1}},
        {"layer_types": ["sliding_attention"] * 2},
    ],
)
def test_rope_and_windows_that_may_change_something(keys):
    with pytest.raises(UnsupportedError, match=next(iter(keys))):
        model_spec({**tiny.CONFIGS["llama"], **keys})


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0]}-{row[2]}")
def test_models_of_another_kind_are_refused(row):
    """Also if their class is named as one of ours: the keys say what is different."""
    with pytest.raises(UnsupportedError):
        model_spec(config_of(row))
    with pytest.raises(
        UnsupportedError, match=rf"{next(iter(row[4]))} .*config=.*--config KEY=null"
    ):
        model_spec({**config_of(row), "architectures": None})


def test_number_of_files():
    assert sum(row[1] for row in (*READ, *REFUSED)) == 96


def test_unknown_keys_are_named_all_at_once():
    on = {f"scale_{i}": "x" * 1000 for i in range(8)} | {"alibi": True}
    with pytest.raises(UnsupportedError) as caught:
        model_spec({**tiny.CONFIGS["llama"], **on, "absent": None, "use_mrope": False})
    message = str(caught.value)
    assert all(key in message for key in on)
    assert "absent" not in message
    assert "use_mrope" not in message
    assert len(message) < 500
    model_spec({**tiny.CONFIGS["llama"], **on, **dict.fromkeys(on)})


def test_the_way_past_an_unknown_class():
    raw = {**tiny.CONFIGS["llama"], "architectures": ["LlamaForEverything"]}
    with pytest.raises(UnsupportedError, match=r"architecture=NAME.*--architecture NAME"):
        model_spec(raw)
    assert model_spec(raw, "LlamaForCausalLM").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bos_and_eos_outside_the_vocabulary_count_as_unset(family):
    size = model_spec(tiny.CONFIGS[family]).config.vocab_size
    ids = {"bos_token_id": size, "eos_token_id": [size + 1, 2, size]}
    config = model_spec({**tiny.CONFIGS[family], **ids}).config
    assert (config.bos_token_id, config.eos_token_ids) == (None, (2,))
    config = model_spec({**tiny.CONFIGS[family], "eos_token_id": 10**9}).config
    assert config.eos_token_ids == ()


def test_gpt2_pads_with_any_token():
    """transformers' GPT-2 has no padding row; Llama's embedding needs one."""
    assert model_spec({**tiny.CONFIGS["gpt2"], "pad_token_id": 50257}).config.pad_token_id is None
    with pytest.raises(ConfigError, match="pad_token_id: 50257 is not in the vocabulary"):
        model_spec({**tiny.CONFIGS["llama"], "pad_token_id": 50257})


@pytest.mark.ci
def test_activation_of_t5_as_in_transformers():
    """`dense_act_fn` and `is_gated_act` come first; names of one function are equal."""

    def logits(**fields: Any) -> np.ndarray:
        return tiny.logits(tiny.make("t5", feed_forward_proj="gated-gelu", **fields))

    tanh = logits()
    np.testing.assert_array_equal(logits(dense_act_fn="gelu_pytorch_tanh", is_gated_act=True), tanh)
    exact = logits(dense_act_fn="gelu")
    assert np.abs(exact - tanh).max() > 1e-6
    np.testing.assert_array_equal(logits(dense_act_fn="gelu_python"), exact)


STRANGE = [True, 0, -1, -2, 2**31, 10**4000, 1.5, 1e308, "", "x", "x" * 5000, "gelu", [], [1], {}]
STRANGE += [[None], ["x"] * 1000, [[1]], [{}], {"a": 1}, {"type": "linear", "factor": [1]}, None]
STRANGE += [{"rope_type": {}}, {"rope_type": "llama3", "factor": 10**400}, {"x" * 5000: 1}]
OTHER_KEYS = ["architectures", "id2label", "layer_types", "model_type", "num_labels", "new\nline"]
OTHER_KEYS += ["problem_type", "quantization_config", "rope_parameters", "rope_scaling", "y" * 5000]
OTHER_KEYS += ["dense_act_fn", "eos_token_id", "pad_token_id", "rope_theta", "sliding_window"]


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_strange_value_of_any_key_is_read_or_named(family):
    """On one line of at most 500 characters."""
    messages = []
    for key in {*tiny.CONFIGS[family], *OTHER_KEYS}:
        for value in STRANGE:
            try:
                model_spec({**tiny.CONFIGS[family], key: value})
            except JaxLLMError as error:
                messages.append(str(error))
    assert len(messages) > 100
    assert [text for text in messages if len(text) > 500 or "\n" in text] == []


@pytest.mark.ci
def test_an_encoder_alone_has_no_decoder_layers() -> None:
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    config = T5Config.from_dict({**sizes, "num_layers": 1, "num_decoder_layers": 0})
    assert T5EncoderModel.from_config(config)([[1]]).last_hidden_state.shape == (1, 1, 8)
    with pytest.raises(ConfigError, match="num_decoder_layers: 0 is an encoder alone"):
        T5ForConditionalGeneration.from_config(config)


def test_a_config_is_made_of_the_keys_of_config_json():
    named = GPT2Config(hidden_size=64, num_attention_heads=4, use_cache=False, type_vocab_size=16)
    assert named == GPT2Config(n_embd=64, n_head=4)
    rope: dict[str, Any] = {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert LlamaConfig(**rope) == LlamaConfig.from_dict(rope)
    with pytest.raises(
        UnsupportedError, match=r"^n_layers \(3\), foo \(1\): unknown in .*GPT2Config"
    ):
        GPT2Config(n_layers=3, foo=1)
    assert T5Config().is_encoder_decoder
    assert not GPT2Config().is_encoder_decoder
