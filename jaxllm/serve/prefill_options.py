"""How a server prefills prompts: in chunks, and after kept prefixes."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh

from jaxllm.batch.programs import prompt_cache_shapes
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.hardware import nbytes
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.models.decoder import GenerativeModel

DEFAULT_CHUNK_SIZE = {"cpu": 256}
DEFAULT_ACCELERATOR_CHUNK_SIZE = 512
DEFAULT_KEPT_PREFIXES = 4


@dataclasses.dataclass(frozen=True)
class PrefillOptions:
    """How prompts are prefilled."""

    chunk_size: int
    """Columns that are prefilled between two decode calls: of a chunk of a long prompt, or of short
    prompts (those of one batch count once). A power of two."""
    kept_prefixes: int = 0
    """Most prefixes that are kept."""
    cache_shapes: Cache | None = None
    """Shapes of a prompt cache; None: every prompt is prefilled as a whole."""

    @property
    def longest_whole(self) -> float:
        """Columns of the longest prompt that is prefilled as a whole."""
        return math.inf if self.cache_shapes is None else self.chunk_size

    @property
    def nbytes(self) -> int:
        """Bytes per device of all prompt caches: those that are kept, that of a prompt that comes
        again, an empty one, the last one of a prompt and its next one."""
        if self.cache_shapes is None:
            return 0
        return (self.kept_prefixes + bool(self.kept_prefixes) + 3) * nbytes(self.cache_shapes)


def prefill_options(
    model: GenerativeModel,
    columns: int,
    chunk_size: int | None,
    kept_prefixes: int | None,
    mesh: Mesh | None,
) -> PrefillOptions:
    """The options for slots of some columns; None: the default.

    Raises:
        UnsupportedError: one is set, but the model's prompts are prefilled as a whole.
    """
    options = {"prefill_chunk_size": chunk_size, "kept_prefixes": kept_prefixes}
    if chunk_size is None:
        chunk_size = DEFAULT_CHUNK_SIZE.get(jax.default_backend(), DEFAULT_ACCELERATOR_CHUNK_SIZE)
    size = bucket(chunk_size, SMALLEST_BUCKET)
    reason = _why_whole(model)
    if reason is not None:
        for name, value in options.items():
            if value:
                raise UnsupportedError(f"{name} cannot be combined with {reason}; leave it out")
        return PrefillOptions(size)
    kept = DEFAULT_KEPT_PREFIXES if kept_prefixes is None else kept_prefixes
    if not kept and columns <= size:
        return PrefillOptions(size)
    return PrefillOptions(size, kept, prompt_cache_shapes(model, columns, mesh))


def buckets(longest: float) -> list[int]:
    """The buckets of prompts of up to `longest` tokens.

    >>> buckets(100)
    [16, 32, 64, 128]
    """
    widths = [SMALLEST_BUCKET]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return widths


def _why_whole(model: GenerativeModel) -> str | None:
    """Why the model's prompts are prefilled as a whole; None: they need not be."""
    if model.is_encoder_decoder:
        return "an encoder-decoder, whose prompt is the encoder's"
    rope = getattr(model.config, "rotary", None)
    if rope is not None and rope.uses_length:
        return "RoPE that depends on the length of the prompt"
    return None
