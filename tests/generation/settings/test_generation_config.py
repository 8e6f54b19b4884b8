"""GenerationConfig: defaults, files, validation, modes, support, lengths."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hub_server import running_hub
from huggingface_hub import constants

from jaxllm.common.errors import ConfigError, InputError, MissingFileError, UnsupportedError
from jaxllm.generation import PhrasalConstraint, WatermarkingConfig
from jaxllm.generation.inputs.values import is_number
from jaxllm.generation.settings.config import FIELDS, GenerationConfig, generation_mode
from jaxllm.generation.settings.resolve import (
    check_consistent,
    check_for_use,
    checked_pad,
    merged_config,
    resolve_max_length,
)


def test_defaults_are_those_of_transformers_4_47():
    config = GenerationConfig()
    assert (config.max_length, config.min_length, config.top_k) == (20, 0, 50)
    assert (config.temperature, config.top_p, config.typical_p) == (1.0, 1.0, 1.0)
    assert (config.do_sample, config.num_beams, config.num_return_sequences) == (False, 1, 1)
    assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (20, 0.4)
    assert config.eos_token_id is None
    assert config.explicit == frozenset()
    for name, field in FIELDS.items():
        assert getattr(config, name) == field.default
        if field.default is not None:
            assert field.check(field.default) == field.default


def test_code_and_file_are_told_apart():
    file = GenerationConfig.from_dict({"temperature": 0.6, "top_p": 0.9, "top_k": None})
    assert file.explicit == frozenset()
    assert (file.temperature, file.top_k) == (0.6, 50)
    config = file.replace(top_p=0.5, do_sample=True)
    assert config.explicit == {"top_p", "do_sample"}
    assert (config.temperature, config.top_p) == (0.6, 0.5)
    assert file.top_p == 0.9
    back = config.merge(GenerationConfig.from_dict({"top_p": 0.7}))
    assert back.top_p == 0.7
    assert back.explicit == {"do_sample"}


def test_none_in_a_call_switches_off_what_a_file_holds():
    file = GenerationConfig.from_dict(
        {"top_k": 40, "temperature": 0.5, "eos_token_id": [2, 3], "max_length": 64}
    )
    config = file.replace(top_k=None, temperature=None, eos_token_id=None, max_length=None)
    assert (config.top_k, config.temperature, config.eos_token_id) == (0, 1.0, None)
    assert config.max_length == 64  # "no length" has no meaning
    model = tiny.cached("llama")  # its end token is 2

    def ends(config):
        return merged_config(model, config, {})[1]

    assert ends(file) == (2, 3)
    assert ends(config) == ()
    assert ends(GenerationConfig()) == (2,)
    assert ends(GenerationConfig.from_dict({"eos_token_id": None})) == (2,)
    assert ends(GenerationConfig(eos_token_id=4)) == (4,)


def test_padding_falls_back_on_the_first_end_token():
    model, padded = tiny.cached("llama"), tiny.cached("gemma")  # which has the pad token 0
    assert checked_pad(model, GenerationConfig(pad_token_id=0), (2, 3)) == 0
    assert checked_pad(padded, GenerationConfig(), (2, 3)) == 2
    assert checked_pad(model, GenerationConfig.from_dict({"pad_token_id": -1}), (2,)) == 2
    assert checked_pad(model, GenerationConfig(), ()) is None
    assert checked_pad(padded, GenerationConfig(), ()) == 0


def test_equal_and_hashed_by_value():
    a = GenerationConfig(eos_token_id=[1, 2], sequence_bias={(1, 2): 1}, temperature=1)
    b = GenerationConfig.from_dict(
        {"temperature": 1.0, "sequence_bias": [[[1, 2], 1.0]], "eos_token_id": [1, 2]}
    )
    assert a == b
    assert hash(a) == hash(b)
    assert a != a.replace(temperature=0.9)
    assert a != "something else"
    assert GenerationConfig(eos_token_id=None) != GenerationConfig()
    assert len({a, b, GenerationConfig()}) == 2


def test_to_dict_comes_back():
    fields = {
        "do_sample": True,
        "eos_token_id": (1, 2),
        "bad_words_ids": ((3,), (4, 5)),
        "exponential_decay_length_penalty": (3, 1.5),
        "transformers_version": "4.47.1",
    }
    config = GenerationConfig.from_dict(fields)
    assert config.to_dict() == fields
    assert GenerationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert eval(repr(config)) == config


def test_json_of_a_config_comes_back():
    config = GenerationConfig(watermarking_config=WatermarkingConfig(bias=2.5), eos_token_id=[1, 2])
    text = json.dumps(config.to_json())
    again = GenerationConfig.from_dict(json.loads(text))
    assert again.watermarking_config == config.watermarking_config
    assert again.eos_token_id == (1, 2)
    with pytest.raises(ConfigError, match=r"f\.json: `watermarking_config` .*`bias`"):
        GenerationConfig.from_dict({"watermarking_config": {"bias": "2"}}, where="f.json")
    for fields in ({"sequence_bias": {(1,): -np.inf}}, {"constraints": [PhrasalConstraint([5])]}):
        with pytest.raises(InputError, match=f"`{next(iter(fields))}`=.* cannot be written"):
            GenerationConfig(**fields).to_json()


def test_immutable_but_copied_and_pickled():
    config = GenerationConfig(top_k=3)
    with pytest.raises(AttributeError, match="replace"):
        config.top_k = 4
    with pytest.raises(AttributeError, match="top_k"):
        config.topk  # noqa: B018
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert same.explicit == config.explicit


def test_numpy_and_jax_scalars_become_python_numbers():
    config = GenerationConfig(
        top_k=np.int64(4),
        temperature=np.float32(0.5),
        top_p=jnp.float32(0.25),
        eos_token_id=np.array([1]),
    )
    assert config == GenerationConfig(top_k=4, temperature=0.5, top_p=0.25, eos_token_id=[1])
    hash(config)


def test_numbers_may_be_tracers():
    @jax.jit
    def step(temperature, min_new_tokens):
        config = GenerationConfig(temperature=temperature, min_new_tokens=min_new_tokens)
        assert generation_mode(config) == "greedy_search"
        check_for_use(config)
        resolve_max_length(config, 3)
        return config.temperature * 2, config.min_new_tokens

    assert [float(x) for x in step(0.5, 4)] == [1.0, 4.0]
    with pytest.raises(InputError, match="do_sample"):
        jax.jit(lambda flag: GenerationConfig(do_sample=flag).top_k)(True)


BAD = {
    "max_length": [0, 2.0, "20", True],
    "max_new_tokens": [0, -1],
    "min_length": [-1],
    "early_stopping": ["always", 1, 0.0, jax.random.key(0)],  # 1 == True, but is not it
    "do_sample": [1, "yes"],
    "num_beams": [0],
    "temperature": [0, -1.0, "hot", float("nan"), float("inf")],
    "top_k": [-1, 1.5, False],
    "top_p": [-0.1, 1.1],
    "min_p": [2],
    "top_h": [0.0],
    "typical_p": [0.0, 1.5],
    "epsilon_cutoff": [1.0],
    "repetition_penalty": [0.0, 1e-300, 1e300],  # 0 and infinity in float32
    "length_penalty": [-1e300],
    "guidance_scale": [1e300],
    "diversity_penalty": [1e300],
    "no_repeat_ngram_size": [-2],
    "bad_words_ids": [[], [[]], [1], "ab", [[-1]], {(1,): 2.0}],
    "force_words_ids": [[], [[]], [1], "ab", [[[1], 2]], {(1,): 2.0}, np.array([1, 2]), 3],
    "constraints": [3, "ab", np.array([1, 2])],
    "cache_config": [3, {1: 2}, {"sliding_window": np.array([3, 4])}],
    "sequence_bias": [{}, {(): 1.0}, [[1, 2]], {(1,): "x"}],
    "forced_eos_token_id": [-1, [], "a"],
    "exponential_decay_length_penalty": [(1,), (-1, 1.0), 5],
    "suppress_tokens": [5, [1.5], "ab"],
    "eos_token_id": [[-1], [], 1.5, "2"],
    "pad_token_id": [-2, [0]],
    "num_assistant_tokens_schedule": ["random"],
    "stop_strings": [[""], 3],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_impossible_values_are_named(name, value):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        GenerationConfig(**{name: value})
    if FIELDS[name].only_sampling and is_number(value):  # as in transformers, when it samples
        file = GenerationConfig.from_dict({name: value})
        check_for_use(file)
        with pytest.raises(ConfigError, match=f"^the model's files: `{name}` must be"):
            check_for_use(file.replace(do_sample=True))
        check_for_use(file.replace(**{"do_sample": True, name: None}))
        if name == "top_k":
            with pytest.raises(ConfigError, match="`top_k` must be"):
                check_for_use(file.replace(penalty_alpha=0.6))
    elif isinstance(value, str | list | dict) and not value:  # off in a file
        assert GenerationConfig.from_dict({name: value}).to_dict() == {}
    else:
        with pytest.raises(ConfigError, match=f"^here.json: `{name}` must be"):
            GenerationConfig.from_dict({name: value}, where="here.json")


def test_unknown_fields_get_a_suggestion():
    with pytest.raises(InputError, match="`temprature`; did you mean `temperature`"):
        GenerationConfig(temprature=1.0)
    with pytest.raises(ConfigError, match=r"^f.json: unknown .*max_new_token .*; did you mean"):
        GenerationConfig.from_dict({"max_new_token": 1}, "f.json")
    with pytest.raises(ConfigError, match=r"^f.json: .*fields alibi \(1\), swing \(2.0\): remove"):
        GenerationConfig.from_dict({"alibi": 1, "top_k": 3, "swing": 2.0}, "f.json")
    with pytest.raises(ConfigError, match=r"unknown generation field 3 \(4\)"):
        GenerationConfig.from_dict({3: 4})
    with pytest.raises(InputError, match="merge: expected a GenerationConfig, found"):
        GenerationConfig().merge({"top_k": 3})
    with pytest.raises(InputError, match=r"argument of generate\(\)"):
        GenerationConfig(streamer=None)
    with pytest.raises(InputError, match="do_sample=False"):
        GenerationConfig(temperature=0.0)


def test_files(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 3], "_from_model_config": true, "top_p": null}')
    assert GenerationConfig.from_file(path).eos_token_id == (2, 3)
    path.write_text('{"max_length": -3}')
    with pytest.raises(ConfigError, match=r"generation_config.json: `max_length`"):
        GenerationConfig.from_file(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold an object"):
        GenerationConfig.from_file(path)
    with pytest.raises(MissingFileError):
        GenerationConfig.from_file(tmp_path / "none.json")


def test_folders(tmp_path):
    config = GenerationConfig(do_sample=True, eos_token_id=[2, 3], sequence_bias=[[[5], -1.0]])
    config.save_pretrained(tmp_path / "model")
    config.save_pretrained(tmp_path / "model", "other.json")
    read = GenerationConfig.from_pretrained(tmp_path / "model")
    assert read.to_dict() == config.to_dict()
    assert GenerationConfig.from_pretrained(tmp_path / "model", "other.json") == read
    assert GenerationConfig.from_pretrained(tmp_path / "model", top_k=7).top_k == 7
    with pytest.raises(MissingFileError, match="none': no such file or folder"):
        GenerationConfig.from_pretrained(tmp_path / "none")


def test_hub_ids(tmp_path, monkeypatch):
    """The files of a Hub id are fetched without its weights."""
    GenerationConfig(top_k=7).save_pretrained(tmp_path)
    content = (tmp_path / "generation_config.json").read_bytes()
    with running_hub(token="none") as hub:
        hub.files["me/model"] = {"generation_config.json": content, "model.safetensors": b"x"}
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        assert GenerationConfig.from_pretrained("me/model", revision="v1", top_p=0.5).top_k == 7
    assert hub.downloads == ["generation_config.json"]


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "greedy_search"),
        ({"do_sample": True}, "sample"),
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"num_beams": 4, "num_beam_groups": 2}, "group_beam_search"),
        ({"num_beams": 4, "num_beam_groups": 2, "do_sample": True}, "group_beam_search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"penalty_alpha": 0.6}, "contrastive_search"),  # top_k defaults to 50
        ({"penalty_alpha": 0.6, "top_k": 1}, "greedy_search"),
        ({"penalty_alpha": 0.0, "top_k": 4}, "greedy_search"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": True}, "sample"),
        ({"force_words_ids": [[1]], "num_beams": 2}, "constrained_beam_search"),
        ({"constraints": ["x"]}, "constrained_beam_search"),
        ({"dola_layers": "low"}, "dola_generation"),
        ({"dola_layers": "low", "do_sample": True}, "dola_generation"),
        ({"dola_layers": "low", "prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"assistant_early_exit": 3, "do_sample": True}, "assisted_generation"),
        ({"prompt_lookup_num_tokens": 3, "num_beams": 2}, "beam_search"),
    ],
)
def test_modes(fields, mode):
    assert generation_mode(GenerationConfig(**fields)) == mode


def test_an_assistant_model_makes_it_assisted():
    assert generation_mode(GenerationConfig(), object()) == "assisted_generation"
    assert generation_mode(GenerationConfig(num_beams=3), object()) == "beam_search"


UNSUPPORTED = {
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "offloaded",
    "return_legacy_cache": True,
    "compile_config": {"backend": "x"},
    "disable_compile": True,
    "continuous_batching_config": {},
    "speculation_type": "dflash",
    "forced_decoder_ids": [[1, 2]],
    "generation_kwargs": {"a": 1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_raises_and_names_itself(name):
    with pytest.raises(UnsupportedError, match=f"`{name}`="):
        check_for_use(GenerationConfig(**{name: UNSUPPORTED[name]}))
    file = GenerationConfig.from_dict({name: UNSUPPORTED[name]})
    if FIELDS[name].execution:
        assert check_for_use(file).to_dict() == {}
    else:
        with pytest.raises(UnsupportedError, match=f"`{name}`="):
            check_for_use(file)
    check_for_use(file.replace(**{name: FIELDS[name].supported[0]}))


def test_outputs_that_a_file_asks_for_need_return_dict_in_generate():
    file = GenerationConfig.from_dict({"output_scores": True, "output_attentions": True})
    assert check_for_use(file).to_dict() == {}
    assert check_for_use(file.replace(output_scores=True)).to_dict() == {"output_scores": True}
    assert check_for_use(file.replace(return_dict_in_generate=True)).output_attentions


def test_keys_without_effect_are_no_obstacle():
    assert (
        repr(GenerationConfig.from_dict({"temperature": 1})) == "GenerationConfig(temperature=1.0)"
    )
    file = {"_name_or_path": "x", "ignore_eos": False, "tokenizer_path": "x", "top_k": 3}
    assert GenerationConfig.from_dict(file).to_dict() == {"top_k": 3}
    chat = {"user_token_id": 195, "assistant_token_id": 196, "chat_format": "chatml"}
    empty = {"bad_words_ids": [], "eos_token_id": [], "sequence_bias": {}}
    assert GenerationConfig.from_dict({**chat, **empty, "max_window_size": 6144}).to_dict() == {}
    with pytest.raises(ConfigError, match=r"field profiles .* set to null"):
        GenerationConfig.from_dict({"profiles": {"creative": {}}})
    for unknown in ({"_note": 3}, {"alibi": False}, {"ignore_eos": True}):
        with pytest.raises(ConfigError, match=f"unknown generation field {next(iter(unknown))}"):
            GenerationConfig.from_dict(unknown)
    offloaded = GenerationConfig.from_dict({"cache_implementation": "hybrid", "cache_config": {}})
    assert check_for_use(offloaded).to_dict() == {}


def test_the_padding_token_of_a_file_may_lie_outside_the_vocabulary():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=10, pad_token_id=None))
    file = GenerationConfig.from_dict({"pad_token_id": 10})
    assert checked_pad(model, file, (2,)) == 2
    with pytest.raises(InputError, match="pad_token_id: 10 is not in the vocabulary"):
        checked_pad(model, GenerationConfig(pad_token_id=10), (2,))


def test_the_list_of_unsupported_options_is_complete():
    assert set(UNSUPPORTED) == {
        name for name, field in FIELDS.items() if field.supported is not None
    }


def test_ordinary_files_are_supported_in_silence():
    llama = {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.45.0.dev0",
    }
    gpt2 = {"_from_model_config": True, "bos_token_id": 50256, "eos_token_id": 50256}
    for fields in (llama, gpt2, {"use_cache": True, "guidance_scale": 1.0}):
        config = GenerationConfig.from_dict(fields)
        check_for_use(config)
        check_consistent(config)
        check_consistent(config.replace(do_sample=False))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_return_sequences": 2}, "greedy"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_beams"),
        ({"suppress_tokens": [1, 2], "forced_eos_token_id": 1}, "forced_eos_token_id"),
        ({"suppress_tokens": [1, 2], "forced_bos_token_id": 2}, "forced_bos_token_id"),
    ],
)
def test_contradictions_raise(fields, named):
    with pytest.raises(InputError, match=named):
        check_consistent(GenerationConfig(**fields))


def test_what_does_not_contradict_passes():
    check_consistent(GenerationConfig(num_return_sequences=2, do_sample=True))
    check_consistent(GenerationConfig(num_return_sequences=2, num_beams=2))
    check_consistent(GenerationConfig(suppress_tokens=[1], forced_eos_token_id=[1, 2]))


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"temperature": 0.7}, "do_sample"),
        ({"top_k": 5}, "do_sample or penalty_alpha"),
        ({"penalty_alpha": 0.6, "do_sample": True}, "top_k > 1 and greedy search"),
        ({"penalty_alpha": 0.6, "top_k": 1}, "top_k > 1 and greedy search"),
        ({"dola_layers": "low", "num_beams": 2}, "greedy search or sampling"),
        ({"dola_layers": [1], "penalty_alpha": 0.6, "top_k": 4}, "greedy search or sampling"),
        ({"top_h": 0.5}, "do_sample"),
        ({"length_penalty": 2.0}, "num_beams"),
        ({"early_stopping": True}, "num_beams"),
        ({"diversity_penalty": 1.0, "num_beams": 2}, "num_beam_groups"),
        ({"num_assistant_tokens": 5}, "an assistant"),
        ({"num_assistant_tokens": 5, "prompt_lookup_num_tokens": 3}, "an assistant"),
        ({"max_matching_ngram_size": 3}, "prompt_lookup_num_tokens"),
        ({"target_lookbehind": 3}, "assistant_tokenizer"),
    ],
)
def test_options_without_effect_warn_only_when_given_in_code(fields, needed):
    with pytest.warns(UserWarning, match=f"has no effect without `{needed}`"):
        check_consistent(GenerationConfig(**fields))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_consistent(GenerationConfig.from_dict(fields))


def test_an_assistant_gives_its_fields_an_effect():
    check_consistent(GenerationConfig(num_assistant_tokens=5), object())
    check_consistent(GenerationConfig(num_assistant_tokens=5, assistant_early_exit=2))
    check_consistent(GenerationConfig(max_matching_ngram_size=3, prompt_lookup_num_tokens=2))


def test_neutral_values_do_not_warn():
    check_consistent(
        GenerationConfig(temperature=1.0, top_k=50, top_p=1.0, min_p=None, length_penalty=1.0)
    )
    check_consistent(GenerationConfig(top_k=None, temperature=None))
    check_consistent(GenerationConfig(penalty_alpha=0.6, top_k=4))
    check_consistent(GenerationConfig(penalty_alpha=0.0))
    check_consistent(GenerationConfig(dola_layers="high", do_sample=True))


@pytest.mark.parametrize(
    ("fields", "prompt", "positions", "expected"),
    [
        ({}, 7, None, 27),
        ({}, 7, 1024, 27),
        ({}, 1010, 1024, 1024),
        ({"max_length": 20}, 7, None, 20),
        ({"max_length": 50}, 7, 32, 50),
        ({"max_new_tokens": 5}, 7, 8, 12),
        ({"max_new_tokens": 5, "min_length": 9}, 7, None, 12),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, 7, None, 12),
        ({"max_new_tokens": 5, "min_new_tokens": 5}, 7, None, 12),
    ],
)
def test_lengths(fields, prompt, positions, expected):
    assert resolve_max_length(GenerationConfig(**fields), prompt, positions) == expected
    assert resolve_max_length(GenerationConfig.from_dict(fields), prompt, positions) == expected


def test_lengths_that_leave_no_room_raise():
    with pytest.raises(InputError, match="prompt has 20 tokens"):
        resolve_max_length(GenerationConfig(max_length=20), 20)
    with pytest.raises(InputError, match="prompt has 32 tokens"):
        resolve_max_length(GenerationConfig(), 32, max_positions=32)
    with pytest.raises(InputError, match="`min_length` asks for at least 30"):
        resolve_max_length(GenerationConfig(max_length=20, min_length=30), 5)
    with pytest.raises(InputError, match="`min_new_tokens` asks for at least 15"):
        resolve_max_length(GenerationConfig(max_new_tokens=5, min_new_tokens=10), 5)


def test_both_lengths_in_code_warn():
    both = GenerationConfig(max_length=30, max_new_tokens=5)
    with pytest.warns(UserWarning, match="no effect beside"):
        assert resolve_max_length(both, 7) == 12
    file = GenerationConfig.from_dict({"max_length": 30}).replace(max_new_tokens=5)
    assert resolve_max_length(file, 7) == 12


def test_a_minimum_beside_that_of_new_tokens_warns():
    with pytest.warns(UserWarning, match="`min_length` has no effect beside"):
        resolve_max_length(GenerationConfig(min_length=9, min_new_tokens=2), prompt_len=3)
