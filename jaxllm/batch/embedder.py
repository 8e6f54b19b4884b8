"""Embeddings of texts: pooled hidden states of a model."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, NonFiniteError
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, padded_rows
from jaxllm.generation.inputs.values import bucket
from jaxllm.models.decoder_only import with_rope_per_row
from jaxllm.models.model import Model
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import row_shards, use_mesh

BATCH_ROWS = 8
"""Texts of one call of the program."""
FILLER = np.zeros(1, np.int32)
"""Token ids of the texts that fill up a batch."""
NOT_FINITE = (
    "the model's hidden states are NaN or infinite; check the weights, or use --dtype float32"
)
Pooling = Literal["mean", "last"]


class Embedder:
    """Pools the last hidden states of a text (of the encoder, for an encoder-decoder).

    Args:
        context: most tokens of a text; None: any number.
        pooling: "mean": of all tokens; "last": of the last token.
        rows: texts of one call of the program.
    """

    def __init__(
        self,
        model: Model[Any],
        context: int | None,
        pooling: Pooling = "mean",
        *,
        rows: int | None = None,
    ) -> None:
        self._model = with_rope_per_row(model)
        self._mesh = mesh_of(model)
        self._context, self._pooling = context, pooling
        shards = row_shards(self._mesh)
        self.rows = -(-(rows or BATCH_ROWS) // shards) * shards

    def warm_up(self) -> None:
        """Compiles the program of each bucket of lengths."""
        assert self._context is not None
        width = SMALLEST_BUCKET
        while width <= bucket(self._context, SMALLEST_BUCKET):
            self._run([np.zeros(min(width, self._context), np.int32)])
            width *= 2

    def check_length(self, name: str, ids: Sized) -> None:
        """Raises InputError for a text that is empty or too long; `name` is its name."""
        if not 0 < len(ids) <= (self._context or len(ids)):
            raise InputError(f"{name}: has {len(ids)} tokens; expected 1 to {self._context}")

    def embed(self, texts: Sequence[Any]) -> list[Float[np.ndarray, " D"]]:
        """The embeddings of texts, given as token ids; each has the length 1.

        Raises:
            InputError: a text is empty or too long.
            NonFiniteError: the hidden states of a text are NaN or infinite.
        """
        for number, ids in enumerate(texts):
            self.check_length(f"input[{number}]", ids)
        embeddings = self._run(texts)
        for number, embedding in enumerate(embeddings):
            if not np.isfinite(embedding).all():
                raise NonFiniteError(f"input[{number}]: {NOT_FINITE}")
        return embeddings

    def _run(self, texts: Sequence[Any]) -> list[Float[np.ndarray, " D"]]:
        """Embeds texts in batches, filled up to `rows` so that `warm_up` has compiled every
        program, and halved if device memory runs out."""
        full = [*map(np.asarray, texts), *[FILLER] * (-len(texts) % self.rows)]
        results = dict(run_in_batches(self.embed_batch, full, self.rows, length=len))
        return [results[i] for i in range(len(texts))]

    def embed_batch(self, texts: Sequence[Int[np.ndarray, " _"]]) -> list[Float[np.ndarray, " D"]]:
        """The embeddings of texts that run at once, in a program for this number of texts.

        The number is rounded up to whole shards of the rows. An embedding is NaN if the model's
        hidden states are not finite.
        """
        fillers = [FILLER] * (-len(texts) % row_shards(self._mesh))
        tokens, mask = padded_rows(
            [*texts, *fillers], bucket(max(map(len, texts)), SMALLEST_BUCKET)
        )
        with use_mesh(self._mesh):
            pooled = _pooled(self._model, tokens, mask, pooling=self._pooling)
        return list(np.asarray(pooled)[: len(texts)])


@partial(jax.jit, static_argnames=("pooling",))
def _pooled(
    model: Any, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, pooling: Pooling
) -> Float[Array, "B D"]:
    if hasattr(model, "encode"):
        x = model.encode(tokens, mask).x
    elif not hasattr(model, "decode"):  # no head
        x = model(tokens, attention_mask=mask).last_hidden_state
    else:
        cache = model.init_cache(*tokens.shape)
        column = jnp.zeros(tokens.shape[0], jnp.int32)  # whose logits nobody reads
        out = model.decode(tokens, mask, cache, cache_is_empty=True, logits_column=column)
        x = out.last_hidden_state
    x = x.astype(jnp.float32)
    if pooling == "mean":
        weights = mask[..., None].astype(jnp.float32)
        x = jnp.sum(x * weights, axis=1) / jnp.sum(weights, axis=1)
    else:
        x = x[jnp.arange(x.shape[0]), jnp.sum(mask, axis=1) - 1]
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    # Divided by an infinite norm, what is finite would be 0; the smallest norm is torch's.
    return jnp.where(jnp.isfinite(norm), x / jnp.maximum(norm, 1e-12), jnp.nan)
