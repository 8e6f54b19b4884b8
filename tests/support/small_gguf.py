"""A small GGUF file of a Llama, whole or with a few of its fields and sizes changed."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from weight_files import gguf_bytes, gguf_field, gguf_tensor

# What a number or a string may be changed to.
EXTREMES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 2**24, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 32]
FIELDS = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "tokenizer.ggml.tokens": ["<s>", "</s>", "Ġa", "見"],
    "tokenizer.ggml.scores": struct.pack("<IIQ4f", 9, 6, 4, 0, -1, -2, -3),
    "tokenizer.ggml.token_type": struct.pack("<IIQ4i", 9, 5, 4, 2, 3, 1, 1),
    "tokenizer.ggml.eos_token_ids": struct.pack("<IIQ2i", 9, 5, 2, 1, 2),
    "general.sampling.temp": 0.6,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.eos_token_id": 1,
}
# A tensor of each type that is read in its own way, some of the others, and one that is not read.
TENSORS = {
    "token_embd.weight": "F16",
    "rope_freqs.weight": "F32",
    "output_norm.weight": "BF16",
    "blk.0.attn_q.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q4_0",
    "blk.0.attn_v.weight": "Q4_1",
    "blk.0.ffn_up.weight": "Q4_K",
    "blk.0.ffn_down.weight": "Q6_K",
    "blk.0.ffn_gate.weight": "Q5_0",
    "blk.0.attn_output.weight": "IQ3_S",
    "blk.0.attn_norm.weight": "MXFP4",
    "blk.0.ffn_norm.weight": "Q8_K",
}
VALUES = [
    *EXTREMES,
    -1,
    True,
    False,
    0.0,
    -1.0,
    1e30,
    math.nan,
    math.inf,
    "",
    "llama",
    "gpt2",
    "t5",
]
VALUES += ["linear", "yarn", [], ["a"], struct.pack("<IIQ2I", 9, 4, 2, 1, 2)]


def gguf_file(rng: random.Random | None = None) -> bytes:
    """A small Llama; with a generator, one to three of its fields and sizes are other ones."""
    fields: list[tuple[str, Any]] = list(FIELDS.items())
    tensors, data = [], b""
    noise = random.Random(0)
    for name, kind in TENSORS.items():
        ggml_type = GGMLQuantizationType[kind]
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        dims = [8] if name.startswith("rope") else [256, 4]
        tensors.append([name, dims, int(ggml_type), len(data)])
        ones = struct.pack("<8f", *[1.0] * 8)
        data += ones if dims == [8] else noise.randbytes(math.prod(dims) // block * block_bytes)
        data += b"\0" * (-len(data) % 32)
    for _ in range(rng.randint(1, 3) if rng else 0):
        tensor = rng.choice(tensors)
        match rng.randrange(6):
            case 0 | 1:
                i = rng.randrange(len(fields))
                fields[i] = (fields[i][0], rng.choice(VALUES))
            case 2:
                fields[rng.randrange(len(fields))] = rng.choice(fields)
            case 3:
                tensor[1] = [rng.choice(EXTREMES) for _ in range(rng.randint(0, 5))]
            case 4:
                tensor[2] = rng.randrange(44)
            case 5:
                tensor[3] = rng.choice([*EXTREMES, *(other[3] for other in tensors)])
    described = [gguf_tensor(*tensor) for tensor in tensors]
    return gguf_bytes([gguf_field(*field) for field in fields], described, data)
