"""Writes folders of transformers 4.57's Flax classes, and cases.json with what they compute.

Needs transformers 4.57.6, the last release series with Flax classes, with Flax, JAX 0.4.38 and
torch; run from the root of the repository. The logits are torch's for the same parameters, which
transformers' own loader of Flax parameters moves to it, and the Flax class must agree. Where it
computes something else from a config (`DEVIATIONS`), torch's are recorded alone.
"""

import contextlib
import json
import shutil
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model

transformers.logging.set_verbosity_error()
HERE = Path(__file__).parent
VOCAB = 31
IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
DECODER_IDS = np.array([[3, 17, 18, 19], [3, 20, 21, 22]])

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.3}
ENDS = {"pad_token_id": 4, "bos_token_id": 3, "eos_token_id": 2}
T5 = {
    **{"vocab_size": VOCAB, "d_model": 8, "d_kv": 6, "d_ff": 20, "num_layers": 2},
    **{"num_decoder_layers": 3, "num_heads": 2, "relative_attention_num_buckets": 6},
    **{"relative_attention_max_distance": 9, "dropout_rate": 0.2, "layer_norm_epsilon": 1e-4},
    **{"pad_token_id": 3, "eos_token_id": 2, "decoder_start_token_id": 3},
}
BART = {
    **{"vocab_size": VOCAB, "d_model": 8, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 12},
    **{"decoder_ffn_dim": 20, "max_position_embeddings": 16, "activation_function": "relu"},
    **{"activation_dropout": 0.1, "init_std": 0.3, "scale_embedding": True, "pad_token_id": 3},
    **{"bos_token_id": 4, "eos_token_id": 2, "decoder_start_token_id": 3, **DROPOUT},
    "forced_eos_token_id": 5,
}
LLAMA = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"rms_norm_eps": 1e-3, "initializer_range": 0.3, **ENDS},
}
GPT2 = {
    **{"vocab_size": VOCAB, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2},
    **{"n_inner": 20, "activation_function": "relu", "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    **{"attn_pdrop": 0.2, "layer_norm_epsilon": 1e-3, "bos_token_id": 3, "eos_token_id": 2},
}
OPT = {
    **{"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "ffn_dim": 20},
    **{"max_position_embeddings": 24, "num_attention_heads": 2, "word_embed_proj_dim": 6},
    **{"do_layer_norm_before": True, "activation_function": "gelu", **DROPOUT, **ENDS},
}
# name of the folder: (the Flax class, its config). A class that is the headless one of a family
# has another prefix of names, or none.
FOLDERS = {
    "t5": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu"}),
    "t5_untied": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5_base": ("T5Model", T5),
    "t5_encoder": ("T5EncoderModel", T5),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "tie_word_embeddings": True}),
    "mt5_untied": ("MT5ForConditionalGeneration", T5),
    "mt5_base": ("MT5Model", T5),
    "mt5_encoder": ("MT5EncoderModel", {**T5, "feed_forward_proj": "relu"}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2_untied": ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "gpt2_base": ("GPT2Model", GPT2),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_size": 8},
            **{"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 2},
            **{"intermediate_size": 20, "window_size": 3, "activation_function": "relu"},
            **{"resid_dropout": 0.1, "embed_dropout": 0.1, "attention_dropout": 0.1},
            **{"layer_norm_epsilon": 1e-3, "bos_token_id": 3, "eos_token_id": 2},
        },
    ),
    "gptj": (
        "GPTJForCausalLM",
        {
            **{"vocab_size": VOCAB, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
            **{"rotary_dim": 4, "n_inner": 20, "activation_function": "relu", "attn_pdrop": 0.1},
            **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-3},
            **{"bos_token_id": 3, "eos_token_id": 2},
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 3, "n_head": 4, **ENDS},
            **{"layer_norm_epsilon": 1e-3, "hidden_dropout": 0.1, "attention_dropout": 0.1},
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "opt": ("OPTForCausalLM", OPT),
    "opt_last": (
        "OPTForCausalLM",
        {
            **OPT,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
            "word_embed_proj_dim": 8,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            **{"vocab_size": VOCAB, "max_position_embeddings": 16, "d_model": 8, "ffn_dim": 20},
            **{"num_layers": 2, "attention_heads": 2, "activation_function": "relu"},
            **{"scale_embedding": False, "bos_token_id": 3, "eos_token_id": 4, **DROPOUT},
        },
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "hidden_act": "relu"}),
    "llama_tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 40, "hidden_act": "gelu"}),
    "gemma": (
        "GemmaForCausalLM",
        {**LLAMA, "head_dim": 6, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", {**BART, "scale_embedding": False}),
    "marian": ("MarianMTModel", {**BART, "activation_function": "swish"}),
    "pegasus": ("PegasusForConditionalGeneration", {**BART, "activation_function": "gelu"}),
}
for family, name in {
    **{"gpt_neo": "GPTNeoModel", "gptj": "GPTJModel", "bloom": "BloomModel", "opt": "OPTModel"},
    **{
        "xglm": "XGLMModel",
        "llama": "LlamaModel",
        "mistral": "MistralModel",
        "gemma": "GemmaModel",
    },
    **{"bart": "BartModel", "mbart": "MBartModel", "marian": "MarianModel"},
    "pegasus": "PegasusModel",
}.items():
    FOLDERS[f"{family}_base"] = (name, FOLDERS[family][1])

# (folder, fields of another config) of which the Flax class ignores one.
DEVIATIONS = [
    ("llama", {"rope_theta": 50.0}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("mistral", {"rope_theta": 50.0}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 3}),
    ("gemma", {"rope_theta": 50.0}),
    ("gemma", {"hidden_act": "relu", "hidden_activation": None}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("opt", {"enable_bias": False}),
    ("xglm", {"pad_token_id": 5}),
]


def random_parameters(model, seed: int) -> dict:
    """Parameters that give logits of a standard deviation of at least 1."""
    rng = np.random.default_rng(seed)
    flat = {}
    for path, like in sorted(flatten_dict(jax.tree.map(np.asarray, model.params)).items()):
        normal = rng.normal(size=like.shape)
        if path[-1] == "kernel":
            fan_in = like.shape["GPT2" in type(model).__name__ and path[-2] != "lm_head"]
            value = normal * 1.5 / np.sqrt(fan_in)
        elif path[-1] == "scale" or (path[-1] == "weight" and "norm" in path[-2]):
            value = 1.4 + 0.3 * normal
        elif path[-1] in ("bias", "final_logits_bias"):
            value = 0.3 * normal
        else:
            value = 1.2 * normal
        flat[path] = value.astype(like.dtype)
    return unflatten_dict(flat)


def positions(name: str) -> dict:
    """`position_ids` of the decoders that count slots otherwise. OPT counts the mask itself."""
    if any(word in name for word in ("T5", "Bart", "Marian", "Pegasus", "OPT", "Bloom")):
        return {}
    return {"position_ids": np.maximum(np.cumsum(MASK, 1) - 1, 0)}


def inputs(name: str) -> dict:
    found = {"input_ids": IDS, "attention_mask": MASK, **positions(name)}
    if any(word in name for word in ("T5", "Bart", "Marian", "Pegasus")) and "Encoder" not in name:
        found["decoder_input_ids"] = DECODER_IDS
    return found


def flax_output(model, name: str) -> np.ndarray:
    return np.asarray(model(**inputs(name))[0], np.float64)


def torch_output(name: str, config, params: dict) -> np.ndarray:
    # Other kinds of attention ignore some fields of GPT-2's config.
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    load_flax_weights_in_pytorch_model(model, params)
    given = {key: torch.tensor(value) for key, value in inputs(name).items()}
    if "Bart" in name or "Marian" in name or "Pegasus" in name or "XGLM" in name:
        given.pop("position_ids", None)  # XGLM of torch adds another offset to them
    with torch.no_grad():
        return model(**given)[0].numpy().astype(np.float64)


def rows(output: np.ndarray) -> np.ndarray:
    """The values at real tokens; padding is nobody's business."""
    return output if output.shape[1] != MASK.shape[1] else output * MASK[..., None]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Of the values at real tokens, in standard deviations."""
    return float(np.abs(rows(a) - rows(b)).max() / rows(b).std())


def record(output: np.ndarray) -> list:
    assert output.std() >= 1, output.std()
    return np.round(output, 6).tolist()


@contextlib.contextmanager
def chunks(size: int):
    """Has flax split arrays of more than so many bytes."""
    before = flax.serialization.MAX_CHUNK_SIZE
    flax.serialization.MAX_CHUNK_SIZE = size
    yield
    flax.serialization.MAX_CHUNK_SIZE = before


def made(name: str, fields: dict, seed: int):
    config_class = getattr(transformers, name).config_class
    config = config_class(**fields)
    model = getattr(transformers, f"Flax{name}")(config)
    model.params = random_parameters(model, seed)
    return model


def variants(models: dict) -> None:
    """The same weights in the other kinds of files."""
    t5, bart = models["t5"], models["bart"]
    # The first tensor of OPT is above the limit alone, so that shard 1 is empty.
    models["opt"].save_pretrained(HERE / "opt_shards", max_shard_size=700)
    t5.save_pretrained(HERE / "t5_shards", max_shard_size="10KB")
    bart.save_pretrained(HERE / "bart_safetensors", safe_serialization=True)
    models["gpt2"].save_pretrained(HERE / "gpt2_safetensors", safe_serialization=True)
    for kind in ("bf16", "fp16"):
        cast = getattr(bart, f"to_{kind}")(bart.params)
        bart.save_pretrained(HERE / f"bart_{kind}", params=cast)
    with chunks(500):
        models["gpt2"].save_pretrained(HERE / "gpt2_chunks")


if __name__ == "__main__":
    for old in HERE.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    cases, models = [], {}
    for seed, (folder, (name, fields)) in enumerate(FOLDERS.items()):
        model = models[folder] = made(name, fields, seed)
        model.save_pretrained(HERE / folder)
        flax_logits = flax_output(model, name)
        torch_logits = torch_output(name, model.config, model.params)
        apart = difference(flax_logits, torch_logits)
        print(folder, name, f"std {flax_logits.std():.2f}", f"apart {apart:.1e}")
        if folder != "llama_tied":  # torch takes the embedding for the head
            assert apart < 5e-5, folder
        cases.append({"folder": folder, "config": {}, "output": record(flax_logits)})
    for folder, fields in DEVIATIONS:
        name, own = FOLDERS[folder]
        config = getattr(transformers, name).config_class(**{**own, **fields})
        torch_logits = torch_output(name, config, models[folder].params)
        other = getattr(transformers, f"Flax{name}")(config)
        other.params = models[folder].params
        flax_logits = flax_output(other, name)
        apart = difference(flax_logits, torch_logits)
        print(folder, fields, f"apart {apart:.1e}")
        assert apart > 1e-3, (folder, fields)
        outputs = {"output": record(torch_logits), "flax_output": record(flax_logits)}
        cases.append({"folder": folder, "config": fields, **outputs})
    variants(models)
    inputs_used = {"ids": IDS, "mask": MASK, "decoder_ids": DECODER_IDS}
    content = {**{k: v.tolist() for k, v in inputs_used.items()}, "cases": cases}
    (HERE / "cases.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
