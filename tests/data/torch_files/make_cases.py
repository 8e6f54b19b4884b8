"""Writes folders with pytorch_model.bin of torch 2.13 or 1.13, and what transformers computes.

Run it from the root of the repository, once in each of two environments: torch 2.13.0 with
transformers 4.57.6, and torch 1.13.1 with transformers 4.36.2. Each writes its own folders and its
own cases file. The weights are drawn from a seed, and the logits are torch's for these weights.
"""

import collections
import contextlib
import json
import shutil
import sys
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
HERE = Path(__file__).parent
IS_OLD = torch.__version__.startswith("1.")
VOCAB = 31
IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
DECODER_IDS = np.array([[3, 17, 18, 19], [3, 20, 21, 22]])

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.3}
ENDS = {"pad_token_id": 4, "bos_token_id": 3, "eos_token_id": 2}
GPT2 = {
    **{"vocab_size": VOCAB, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2},
    **{"n_inner": 20, "activation_function": "relu", "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    **{"attn_pdrop": 0.2, "layer_norm_epsilon": 1e-3, "bos_token_id": 3, "eos_token_id": 2},
}
T5 = {
    **{"vocab_size": VOCAB, "d_model": 8, "d_kv": 6, "d_ff": 20, "num_layers": 2},
    **{"num_decoder_layers": 3, "num_heads": 2, "relative_attention_num_buckets": 6},
    **{"relative_attention_max_distance": 9, "dropout_rate": 0.2, "layer_norm_epsilon": 1e-4},
    **{"feed_forward_proj": "relu", "pad_token_id": 3, "eos_token_id": 2},
    "decoder_start_token_id": 3,
}
BART = {
    **{"vocab_size": VOCAB, "d_model": 8, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 12},
    **{"decoder_ffn_dim": 20, "max_position_embeddings": 16, "activation_function": "relu"},
    **{"activation_dropout": 0.1, "init_std": 0.3, "scale_embedding": True, "pad_token_id": 3},
    **{"bos_token_id": 4, "eos_token_id": 2, "decoder_start_token_id": 3, **DROPOUT},
    "forced_eos_token_id": 5,
}
CLASSES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "marian": (
        "MarianMTModel",
        {
            **BART,
            "decoder_vocab_size": VOCAB,
            "forced_eos_token_id": 2,
            "activation_function": "silu",
        },
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", {**BART, "pad_token_id": 1}),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "llama": (
        "LlamaForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, **ENDS},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 32, "rms_norm_eps": 1e-3, "rope_theta": 500.0},
        },
    ),
    "opt": (
        "OPTForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "ffn_dim": 20},
            **{"max_position_embeddings": 24, "num_attention_heads": 2, "word_embed_proj_dim": 6},
            **{"do_layer_norm_before": True, "activation_function": "gelu", **DROPOUT, **ENDS},
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            **{"vocab_size": VOCAB, "max_position_embeddings": 16, "d_model": 8, "ffn_dim": 20},
            **{"num_layers": 2, "attention_heads": 2, "activation_function": "relu", **DROPOUT},
            **{"scale_embedding": False, "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 1},
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4, **ENDS},
            **{"layer_norm_epsilon": 1e-3, "hidden_dropout": 0.1, "attention_dropout": 0.1},
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_size": 8},
            **{"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 2},
            **{"intermediate_size": 20, "window_size": 3, "activation_function": "relu"},
            **{"resid_dropout": 0.1, "embed_dropout": 0.1, "attention_dropout": 0.1},
            **{"layer_norm_epsilon": 1e-3, "bos_token_id": 3, "eos_token_id": 2},
        },
    ),
}


def drawn(family: str) -> torch.nn.Module:
    """A model whose weights are drawn from a seed of the family."""
    name, fields = CLASSES[family]
    config = getattr(transformers, name).config_class(**fields)
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # sinusoidal positions
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and key.endswith("weight")
            parameter.copy_(3 + 0.2 * noise if is_norm else 0.6 * noise)
    return model


def logits(model: torch.nn.Module) -> np.ndarray:
    arguments = {"input_ids": IDS, "attention_mask": MASK}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = DECODER_IDS
    with torch.no_grad():
        return model(**{k: torch.tensor(v) for k, v in arguments.items()}).logits.numpy()


def legacy(state: dict, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def in_training(state: dict, path: Path) -> None:
    """As scripts save a model in DataParallel, with their own values beside it."""
    named = collections.OrderedDict((f"module.{name}", x) for name, x in state.items())
    torch.save({"epoch": 3, "state_dict": named, "best": 0.5, "arch": "x"}, path)


def big_endian(state: dict, path: Path) -> None:
    """As torch saves on a machine with this byte order; read back with torch."""
    swapped = {name: x.clone() for name, x in state.items()}
    for x in swapped.values():
        x.untyped_storage().byteswap(x.dtype)
    with mock.patch.object(sys, "byteorder", "big"):
        torch.save(swapped, path)
    again = torch.load(path)
    assert all(torch.equal(again[name], x) for name, x in state.items())


def one_storage(state: dict, path: Path) -> None:
    """As optimizers that flatten a model leave it: all tensors are views of one storage."""
    flat = torch.cat([x.reshape(-1) for x in state.values()])
    views, start = collections.OrderedDict(), 0
    for name, x in state.items():
        views[name] = flat[start : start + x.numel()].view(x.shape)
        start += x.numel()
    torch.save(views, path)


def strided(state: dict, path: Path) -> None:
    """Transposed, sliced and expanded tensors, and parameters rather than tensors."""
    views = collections.OrderedDict()
    for number, (name, x) in enumerate(state.items()):
        if x.ndim == 2 and number % 2:
            x = x.t().contiguous().t()
        elif x.ndim == 2:
            x = torch.cat([torch.zeros(len(x), 3), x], 1)[:, 3:]
        views[name] = torch.nn.Parameter(x)
    torch.save(views, path)


def gpt2_of_the_hub(state: dict, path: Path) -> None:
    """Without the prefix and the head, and with the buffers of old versions."""
    base = collections.OrderedDict()
    for name, x in state.items():
        if name != "lm_head.weight":
            base[name.replace("transformer.", "", 1)] = x
    for layer in range(GPT2["n_layer"]):
        mask = torch.tril(torch.ones(16, 16, dtype=torch.uint8)).view(1, 1, 16, 16)
        base[f"h.{layer}.attn.bias"] = mask
        base[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(base, path)


def t5_of_the_hub(state: dict, path: Path) -> None:
    """With the bias of the cross-attention, which old versions had and no version used."""
    key = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    legacy({**state, key: torch.ones(6, 2)}, path)


def half(kind: torch.dtype):
    return lambda state, path: torch.save({k: x.to(kind) for k, x in state.items()}, path)


# family, how its state dict is written; None: by save_pretrained, in shards
FOLDERS = {
    "gpt2_hub": ("gpt2", gpt2_of_the_hub),
    "t5_hub": ("t5", t5_of_the_hub),
    "opt_shards": ("opt", None),
    "xglm_legacy": ("xglm", legacy),
    "marian_zip": ("marian", torch.save),
    "m2m_100_shards": ("m2m_100", None),
    "bart_big_endian": ("bart", big_endian),
    "pegasus_legacy": ("pegasus", legacy),
    "llama_in_training": ("llama", in_training),
    "bloom_one_storage": ("bloom", one_storage),
    "gpt_neo_strided": ("gpt_neo", strided),
    "opt_float16": ("opt", half(torch.float16)),
    "llama_bfloat16": ("llama", half(torch.bfloat16)),
}
OLD_FOLDERS = {
    "gpt2_torch113": ("gpt2", torch.save),
    "gpt2_torch113_legacy": ("gpt2", legacy),
    "t5_torch113_shards": ("t5", None),
    "xglm_torch113": ("xglm", torch.save),
    "marian_torch113_legacy": ("marian", legacy),
}


def main() -> None:
    cases = {}
    for name, (family, write) in (OLD_FOLDERS if IS_OLD else FOLDERS).items():
        folder = HERE / name
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        model = drawn(family)
        options = {"max_shard_size": 4000} if write is None else {}
        model.save_pretrained(folder, safe_serialization=False, **options)
        (folder / "generation_config.json").unlink()
        if write is not None:
            write(model.state_dict(), folder / "pytorch_model.bin")
        if "float16" in name:
            state = torch.load(folder / "pytorch_model.bin")
            model.load_state_dict({key: x.float() for key, x in state.items()})
        values = logits(model)
        real = values if values.shape[1] != MASK.shape[1] else values[MASK.astype(bool)]
        print(name, real.std(), sum(path.stat().st_size for path in folder.iterdir()))
        assert real.std() >= 1
        cases[name] = [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in values]
    (HERE / f"cases_torch{1 if IS_OLD else 2}.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
