"""Presents a GGUF model as a Hugging Face checkpoint: tensor names, tensor layout, config.

llama.cpp renames tensors and changes three kinds, undone here:

* Llama's query and key projections, not Qwen's. Hugging Face rotates dimension ``i`` of a head with
  ``i + d/2`` (half-split), GGUF with its neighbour (interleaved), so the rows of each head are
  reordered; keys have ``num_key_value_heads`` heads. Cohere's are interleaved in both.
* GPT-2's ``Conv1D`` weights, which Hugging Face keeps as ``[in, out]``, are transposed in GGUF.
* Gemma's norms multiply by ``1 + weight``, which is what GGUF has.

Experts are stacked in GGUF, as in our models: their names keep ``{e}`` for the expert's number.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.checkpoint.gguf.config import ROPE_FACTORS, hf_config_from_gguf
from jaxllm.checkpoint.gguf.generation import generation_settings
from jaxllm.checkpoint.gguf.reader import Blocks, GGUFFile
from jaxllm.checkpoint.source import Index, TensorInfo, WeightSource, find_tensor
from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted

_LLAMA = (
    *("model.embed_tokens", "model.norm", "lm_head"),
    *("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm"),
    *(f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"),
    *(f"model.layers.{{}}.mlp.{x}_proj" for x in ("gate", "up", "down")),
)
_HEAD_NORMS = ("model.layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.k_norm")
_MIXTRAL = (
    "model.layers.{}.block_sparse_moe.gate",
    *(f"model.layers.{{}}.block_sparse_moe.experts.{{{{e}}}}.w{x}" for x in "123"),
)
_QWEN3MOE = (
    "model.layers.{}.mlp.gate",
    *(f"model.layers.{{}}.mlp.experts.{{{{e}}}}.{x}_proj" for x in ("gate", "up", "down")),
)
_GEMMA2 = (
    "model.layers.{}.pre_feedforward_layernorm",
    "model.layers.{}.post_feedforward_layernorm",
)
_GPT2 = (
    *("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"),
    *(f"transformer.h.{{}}.{x}" for x in ("ln_1", "attn.c_attn", "attn.c_proj")),
    *(f"transformer.h.{{}}.{x}" for x in ("ln_2", "mlp.c_fc", "mlp.c_proj")),
)
_GPT2_CONV1D = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


def _t5_stack(stack: str, attentions: tuple[str, ...]) -> tuple[str, ...]:
    """Names of one of T5's stacks, whose layers have these attentions before the feed-forward."""
    parts = [
        f"{number}.{part}"
        for number, name in enumerate(attentions)
        for part in ("layer_norm", *(f"{name}.{x}" for x in (*"qkvo", "relative_attention_bias")))
    ]
    last = len(attentions)
    parts += [f"{last}.layer_norm", *(f"{last}.DenseReluDense.{x}" for x in ("wi_0", "wi_1", "wo"))]
    return (f"{stack}.final_layer_norm", *(f"{stack}.block.{{}}.layer.{part}" for part in parts))


_T5ENCODER = ("shared", "lm_head", *_t5_stack("encoder", ("SelfAttention",)))
_NAMES = {
    "llama": (*_LLAMA, *_MIXTRAL),
    "qwen2": _LLAMA,
    "qwen3": (*_LLAMA, *_HEAD_NORMS),
    "command-r": (*_LLAMA, *_HEAD_NORMS),
    "gemma": _LLAMA,
    "qwen3moe": (*_LLAMA, *_HEAD_NORMS, *_QWEN3MOE),
    "gemma2": (*_LLAMA, *_GEMMA2),
    "gemma3": (*_LLAMA, *_GEMMA2, *_HEAD_NORMS),
    "gpt2": _GPT2,
    "t5": (*_T5ENCODER, *_t5_stack("decoder", ("SelfAttention", "EncDecAttention"))),
    "t5encoder": _T5ENCODER,
}
"""Hugging Face's names, with the layer's number left out. The gguf package has llama.cpp's."""

_BLOCK = re.compile(r"(?<=blk\.)[0-9]+(?=\.)")


@functools.cache
def _hf_names(architecture: str) -> dict[str, str]:
    """Hugging Face's names by llama.cpp's, both with the layer's number left out."""
    from gguf.constants import MODEL_ARCH_NAMES  # slow
    from gguf.tensor_mapping import get_tensor_name_map

    known = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, 1)
    found = {names.get_name(x.format(0).replace(".{e}", "")): x for x in _NAMES[architecture]}
    pairs = ((gguf.replace("blk.0.", "blk.{}."), hf) for gguf, hf in found.items() if gguf)
    return {"output": "lm_head", **dict(pairs)}


def hf_name(architecture: str, name: str, *, gated: bool = True) -> str | None:
    """Hugging Face's name of a GGUF tensor; None if it has no counterpart.

    Args:
        architecture: llama.cpp's name of the model's architecture, such as ``llama``.
        name: llama.cpp's name.
        gated: for T5: the feed-forward is gated (``wi_0`` and ``wi_1``), not plain (``wi``).

    >>> hf_name("llama", "blk.7.attn_q.weight")
    'model.layers.7.self_attn.q_proj.weight'
    """
    stem, _, leaf = name.rpartition(".")
    block = _BLOCK.search(stem)
    pattern = _hf_names(architecture).get(_BLOCK.sub("{}", stem))
    if pattern is None or leaf not in ("weight", "bias") or "{" in stem:
        return None
    if not gated:
        pattern = pattern.replace(".wi_1", ".wi")
    return f"{pattern.format(block[0] if block else '')}.{leaf}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders interleaved rows of each head to half-split; shape ``[heads * d, ...]``.

    The inverse of ``LlamaModel.permute`` in llama.cpp's converter: within each head, rows
    0, 2, 4, ... come first, then 1, 3, 5, ...

    >>> unpermute(np.arange(8), heads=2)
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    half = len(weight) // (2 * max(heads, 1))
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class _Tensor:
    gguf_name: str
    transposed: bool = False
    heads: int | None = None
    """Number of heads for :func:`unpermute`; None: rows are in Hugging Face's order."""
    added: float = 0.0
    """What llama.cpp adds to the tensor."""
    rows: tuple[int, int] | None = None
    """First row and number of rows of a projection that is stored with others; None: all rows."""

    def stored(self, index: Index) -> Index:
        """The index in the file of a slice of the tensor."""
        if self.rows is None:
            return index
        first, count = self.rows
        start, stop, _ = (index[0] if index else slice(None)).indices(count)
        return (slice(first + start, first + max(start, stop)), *index[1:])


class HFView(WeightSource):
    """View of a :class:`GGUFFile` with Hugging Face's names and layout.

    Transposed tensors are views, so they may be Fortran-ordered. Closing it closes the file.

    Attributes:
        file: the GGUF file.
        config: the model's config.json.
        generation: fields of the generation config: end tokens, and defaults for sampling.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        infos = {name: file.info(name) for name in file.names()}
        if not infos:
            raise CheckpointError(
                f"{file.path}: holds no tensors, perhaps a vocabulary alone; give a model's file"
            )
        factors = file.read(ROPE_FACTORS) if ROPE_FACTORS in infos else None
        self.config: dict[str, Any] = hf_config_from_gguf(file.metadata, infos, factors)
        architecture = file.metadata["general.architecture"]
        size = self.config["vocab_size"]
        self.generation = generation_settings(file.metadata, size, str(file.path))
        gated = self.config.get("feed_forward_proj", "").startswith("gated")
        self._tensors: dict[str, _Tensor] = {}
        for name, info in infos.items():
            if architecture == "llama" and name == ROPE_FACTORS:  # now in the config
                continue
            target = hf_name(architecture, name, gated=gated)
            if target is None and ".attn_qkv." in name and "head_dim" in self.config:
                self._tensors |= self._projections(architecture, name, info)
                continue
            if target is None:
                raise UnsupportedError(
                    f"{file.path}: tensor {quoted(name)} is no part of the {architecture} model "
                    "that jaxllm implements"
                )
            self._tensors[target] = self._converted(architecture, name, info)

    def _projections(self, architecture: str, name: str, info: TensorInfo) -> dict[str, _Tensor]:
        """The projections of queries, keys and values, which `--fuse-qkv` of the converter stores
        as one tensor, by their names."""
        width = self.config["head_dim"]
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
        counts = [self.config[key] * width for key in heads.values()]
        if info.shape[0] != sum(counts):
            raise CheckpointError(
                f"{self.file.path}: {quoted(name)} has {info.shape[0]} rows, not the {sum(counts)} "
                "of queries, keys and values"
            )
        found: dict[str, _Tensor] = {}
        for number, part in enumerate(heads):
            own = name.replace("attn_qkv", f"attn_{part}")
            shape = (counts[number], *info.shape[1:])
            tensor = self._converted(architecture, own, replace(info, shape=shape))
            rows = (sum(counts[:number]), counts[number])
            target = hf_name(architecture, own)
            assert target is not None  # of a rotary architecture
            found[target] = replace(tensor, gguf_name=name, rows=rows)
        return found

    def _converted(self, architecture: str, name: str, info: TensorInfo) -> _Tensor:
        layer = name.split(".")[-2]
        if architecture == "llama" and layer in ("attn_q", "attn_k"):
            key = "num_attention_heads" if layer == "attn_q" else "num_key_value_heads"
            heads = self.config[key]
            if info.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{self.file.path}: {quoted(name)} has {info.shape[0]} rows, which are no "
                    f"{heads} heads of an even size"
                )
            return _Tensor(name, heads=heads)
        if architecture.startswith("gemma") and layer.endswith("norm"):
            return _Tensor(name, added=1.0)
        conv1d = layer in _GPT2_CONV1D and name.endswith(".weight")
        return _Tensor(name, transposed=architecture == "gpt2" and conv1d)

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = find_tensor(self._tensors, name, self.file.path)
        info = self.file.info(tensor.gguf_name)
        if tensor.rows is not None:
            rows, total = tensor.rows[1], info.shape[0]
            shape = (rows, *info.shape[1:])
            return replace(info, shape=shape, nbytes=info.nbytes * rows // total)
        return replace(info, shape=info.shape[::-1]) if tensor.transposed else info

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        tensor = find_tensor(self._tensors, name, self.file.path)
        if tensor.transposed:
            return self.file.read(tensor.gguf_name, index[::-1]).T
        if tensor.heads is None:
            values = self.file.read(tensor.gguf_name, tensor.stored(index))
            return values - values.dtype.type(tensor.added) if tensor.added else values
        heads, stored, rows = self._whole_heads(tensor, tensor.heads, index)
        return unpermute(self.file.read(tensor.gguf_name, stored), heads)[rows]

    def _whole_heads(self, tensor: _Tensor, heads: int, index: Index) -> tuple[int, Index, slice]:
        """What to read for some rows, which are spread over their whole heads: the number of these
        heads, their index in the file, and the rows in them."""
        count = tensor.rows[1] if tensor.rows else self.file.info(tensor.gguf_name).shape[0]
        size = count // heads
        start, stop, _ = (index[0] if index else slice(None)).indices(count)
        first, last = start // size, -(-max(start, stop) // size)
        stored = (slice(first * size, last * size), *index[1:])
        return (
            last - first,
            tensor.stored(stored),
            slice(start - first * size, max(start, stop) - first * size),
        )

    def quantization(self, name: str) -> str:
        """Name of a tensor's ggml type."""
        return self.file.quantization(find_tensor(self._tensors, name, self.file.path).gguf_name)

    def blocks(self, name: str, index: Index = ()) -> Blocks | None:
        """The blocks of a quantized matrix [out, in], transposed or not, or of a slice of it; None
        for other tensors."""
        tensor = find_tensor(self._tensors, name, self.file.path)
        if tensor.heads is None:
            return self.file.blocks(tensor.gguf_name, tensor.stored(index))
        heads, stored, rows = self._whole_heads(tensor, tensor.heads, index)
        blocks = self.file.blocks(tensor.gguf_name, stored)
        return None if blocks is None else blocks.map(lambda x: unpermute(x, heads)[rows])

    def release_pages(self, name: str) -> None:
        self.file.release_pages(find_tensor(self._tensors, name, self.file.path).gguf_name)

    def close(self) -> None:
        self.file.close()
