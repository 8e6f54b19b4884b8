"""Model FLOPs of a training step and peak FLOP/s of the devices, for the MFU.

Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) counts the model's
matrix products, once forward and twice backward, for tokens without padding. Padding and
recomputation (remat) are not counted. The peak is from data sheets, or measured if none is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import os
import platform
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float64, Int

from jaxllm.models.decoder_only import DecoderOnly
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.expert_use import EXPERTS, used_shares
from jaxllm.models.model import LanguageModel, Model
from jaxllm.models.weights import parameters
from jaxllm.nn.block import Stack

EMBEDDINGS = ("backbone.embed.weight", "shared.weight", "decoder_input.embed.weight")
ABOVE = (3, 0)
"""Depth of what comes after all blocks."""
# Dense bfloat16 (V100, T4: float16) FLOP/s of one JAX device, from the vendors' data sheets, by a
# part of its device_kind; the first match counts. A TPU v2 or v3 device is one of two cores.
PEAK_FLOPS = (
    ("B200", 2.25e15),
    ("H200 NVL", 8.35e14),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("A100", 3.12e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("L40S", 3.62e14),
    ("L4", 1.21e14),
    ("V100", 1.25e14),
    ("T4", 6.5e13),
    ("RTX 4090", 1.65e14),
    ("RTX 3090", 7.1e13),
    ("TPU v6", 9.18e14),
    ("TPU v5 lite", 1.97e14),
    ("TPU v5e", 1.97e14),
    ("TPU v5p", 4.59e14),
    ("TPU v5", 4.59e14),
    ("TPU v4", 2.75e14),
    ("TPU v3", 6.15e13),
    ("TPU v2", 2.25e13),
)
# Size and dtype of the matrix products that are measured.
ACCELERATOR_PRODUCT = (8192, "bfloat16")
CPU_PRODUCT = (1024, "float32")


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Numbers of tokens of a batch without padding, and of token pairs in attention."""

    tokens: int
    """Tokens of the decoder."""
    pairs: int
    source_tokens: int = 0
    """Tokens of the encoder."""
    source_pairs: int = 0
    cross_pairs: int = 0

    @staticmethod
    def of_lengths(lengths: Int[np.ndarray, "N K"]) -> TokenCounts:
        """Counts from the lengths of all sequences: (tokens,), or (encoder, decoder) for seq2seq.

        >>> TokenCounts.of_lengths(np.array([[3], [2]]))
        TokenCounts(tokens=5, pairs=13, source_tokens=0, source_pairs=0, cross_pairs=0)
        """
        target, source = lengths[:, -1], lengths[:, :-1]
        return TokenCounts(
            tokens=int(target.sum()),
            pairs=int((target**2).sum()),
            source_tokens=int(source.sum()),
            source_pairs=int((source**2).sum()),
            cross_pairs=int((source * target[:, None]).sum()),
        )


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one optimizer step, for each unit of `TokenCounts`."""

    per_token: float
    per_pair: float
    per_source_token: float = 0.0
    per_source_pair: float = 0.0
    per_cross_pair: float = 0.0

    def of(self, counts: TokenCounts) -> float:
        """FLOPs of a step with these token counts."""
        return sum(map(operator.mul, dataclasses.astuple(self), dataclasses.astuple(counts)))


def model_flops(model: Model[Any], trainable: Collection[str] | None = None) -> ModelFlops:
    """Estimates the FLOPs of a training step: 6 per matrix element and token, plus attention.

    A matrix element takes 2 FLOPs forward, 2 for the gradient of the activations, and 2 for its own
    gradient, the last only if it is trained. Attention takes 4 forward and 8 backward per layer,
    token pair and head element (all pairs, including those hidden by a causal mask or window).
    Blocks below the lowest trained parameter have no backward pass. Of experts those that a token
    goes to are counted. Not counted: embedding lookups, norms, softmax, adapters.

    Args:
        model: a model, whose arrays may be abstract.
        trainable: paths of the parameters that get gradients; None: all. With LoRA, only
            those of the adapters.
    """
    params = parameters(model)
    trained = params.keys() if trainable is None else trainable
    lowest = min(map(_depth, trained), default=ABOVE)
    elements = {"token": 0.0, "source": 0.0}
    used = used_shares(model)
    for path, leaf in params.items():
        if len(leaf.shape) == 2 + (EXPERTS in path) and not _is_looked_up(path, model):
            depth = ABOVE if path in EMBEDDINGS else _depth(path)  # a tied one is the head
            cost = 2.0 + 2.0 * (depth >= lowest) + 2.0 * (path in trained)
            cost *= leaf.size * used[path]
            is_source = path.startswith("encoder.") or ".cross.k." in path or ".cross.v." in path
            elements["source" if is_source else "token"] += cost
    if isinstance(model, EncoderDecoderLM):
        encoder = _attention(model.encoder, "encoder", lowest)
        decoder = _attention(model.decoder, "decoder", lowest)
        return ModelFlops(
            per_token=elements["token"],
            per_pair=decoder,
            per_source_token=elements["source"],
            per_source_pair=encoder,
            per_cross_pair=decoder,
        )
    assert isinstance(model, DecoderOnly)
    attention = _attention(model.backbone.stack, "backbone.stack", lowest)
    return ModelFlops(per_token=elements["token"], per_pair=attention)


def _depth(path: str) -> tuple[int, int]:
    """Position of a parameter in the order of computation: part of the model, and block.

    >>> _depth("shared.weight") < _depth("encoder.blocks.3.mlp.up.weight")
    True
    >>> _depth("backbone.stack.blocks.9.attn.q.lora_a") < _depth("backbone.stack.norm.weight")
    True
    """
    block = re.search(r"\bblocks\.(\d+)\.", path)
    if block is not None:
        return (1 if path.startswith("encoder.") else 2), int(block[1])
    if path.startswith("encoder."):  # its norm; or the relative bias, which all blocks read
        return (1, 0) if "position_bias" in path else (2, -1)
    if "position_bias" in path:
        return (2, 0)
    if path.startswith("decoder_input."):
        return (2, -1)
    first = ("shared.", "backbone.embed", "backbone.positions", "encoder_input.")
    return (0, 0) if path.startswith(first) else ABOVE


def _is_looked_up(path: str, model: Model[Any]) -> bool:
    """True for matrices used only for lookup, and biases of two axes. A tied embedding is also the
    LM head's matrix."""
    if "positions" in path or "position_bias" in path or path.endswith("_bias"):
        return True
    if path not in EMBEDDINGS:
        return False
    if not isinstance(model, LanguageModel) or model.lm_head is not None:
        return True
    return parameters(model)[path] is not jax.tree.leaves(model.decoder_embedding)[0]


def _attention(stack: Stack, name: str, lowest: tuple[int, int]) -> float:
    """FLOPs of the blocks' attention, for each pair of tokens."""
    total = 0.0
    for number, block in enumerate(stack.blocks):
        has_backward = _depth(f"{name}.blocks.{number}.") >= lowest
        total += (12.0 if has_backward else 4.0) * block.attn.heads * block.attn.head_dim
    return total


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all devices together, and the source of the number."""

    flops: float
    source: str

    def __str__(self) -> str:
        """
        >>> print(Peak(9.89e14, "data sheet"))
        9.89e+14 FLOP/s (data sheet)
        """
        return f"{self.flops:.3g} FLOP/s ({self.source})"


def peak_flops(devices: Sequence[Any] | None = None) -> Peak:
    """Peak FLOP/s of the devices, of all processes by default; every process calls it.

    Accelerators are looked up by `device_kind`, regardless of the model's dtype. Of other devices
    the fastest of a few matrix products is measured: on a CPU in float32, by the time of the
    processor, so that other programs that use it do not count (about 0.1 s); on an accelerator in
    bfloat16. Virtual devices of a CPU share one processor, as do the processes of one machine.
    """
    devices = jax.devices() if devices is None else devices
    own = (device for device in devices if device.process_index == jax.process_index())
    first = next(own)
    if first.platform != "cpu":
        per_device = known_peak(first.device_kind)
        if per_device is not None:
            source = f"data sheet: {first.device_kind} x {len(devices)}, dense 16-bit"
            return Peak(per_device * len(devices), source)
        return Peak(_measured_accelerator(first) * len(devices), _source(first, len(devices)))
    peaks, machines = _of_processes(_measured_cpu(first)), _of_processes(_machine_number())
    by_machine = dict(zip(machines.tolist(), peaks.tolist(), strict=True))
    return Peak(sum(by_machine.values()), _source(first, len(by_machine)))


def _source(device: Any, count: int) -> str:
    is_cpu = device.platform == "cpu"
    size, dtype = CPU_PRODUCT if is_cpu else ACCELERATOR_PRODUCT
    name = "machine" if is_cpu else device.device_kind
    return f"measured: {dtype} product of {size} x {size}, {name} x {count}"


def _of_processes(value: float) -> Float64[np.ndarray, " P"]:
    """The values of all processes, in their order."""
    if jax.process_count() == 1:
        return np.array([value], np.float64)
    # As bytes, since JAX would convert a float64 to float32.
    sent = np.frombuffer(np.float64(value).tobytes(), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(sent), np.uint8)
    return np.frombuffer(gathered.tobytes(), np.float64)


def _machine_number() -> float:
    """A number that the processes of one machine have in common."""
    digest = hashlib.sha256(f"{platform.node()} {uuid.getnode()}".encode()).digest()
    return float(int.from_bytes(digest[:6]))


def known_peak(device_kind: str) -> float | None:
    """Looks up the peak FLOP/s of a device by its name; None if unknown.

    >>> known_peak("NVIDIA H100 80GB HBM3"), known_peak("abacus")
    (989000000000000.0, None)
    """
    words = f" {device_kind} ".replace("-", " ")
    return next((peak for name, peak in PEAK_FLOPS if f" {name} " in words), None)


def _measured_accelerator(device: Any) -> float:
    """FLOP/s of one device: the best of three runs of ten products in a row."""
    size, dtype = ACCELERATOR_PRODUCT
    count = 10
    x = jax.device_put(np.eye(size, dtype=np.float32), device).astype(dtype)
    products = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ x, x))
    best = _fastest(lambda: products(x), time.perf_counter)
    return 2.0 * size**3 * count / best


def _measured_cpu(device: Any) -> float:
    """FLOP/s of all cores that this process may use."""
    size, dtype = CPU_PRODUCT
    x = jax.device_put(np.full((size, size), 0.5, dtype), device)
    product = jax.jit(jnp.dot)
    best = _fastest(lambda: product(x, x), time.process_time)
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 2.0 * size**3 / best * cores


def _fastest(run: Callable[[], jax.Array], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of three runs, after one that compiles."""
    run().block_until_ready()
    seconds: list[float] = []
    for _ in range(3):
        start = clock()
        run().block_until_ready()
        seconds.append(clock() - start)
    return min(seconds)
