"""`RowEmbedder`: embeddings of many rows, pooled states of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxllm.batch.embedder import BATCH_ROWS, NOT_FINITE, Embedder, Pooling
from jaxllm.batch.row_prompts import PromptReader, RowPrompt, checked_row
from jaxllm.batch.row_task import RowTask, checked_batch_size
from jaxllm.batch.rows import BatchOutput, RawRow, error_output
from jaxllm.common.errors import NonFiniteError
from jaxllm.models.model import Model
from jaxllm.tokenizers.tokenizer import Tokenizer

EMBED_KEYS = frozenset(field.name for field in dataclasses.fields(RowPrompt))
EMBED_RESULTS = ("embedding",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedRow(BatchOutput):
    """Embedding of a row's prompt."""

    embedding: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "embedding": self.embedding}


class RowEmbedder(RowTask[np.ndarray, np.ndarray]):
    """Embeds rows: mappings with one of `prompt`, `messages` and `input_ids`.

    Args:
        model: with or without a head; of an encoder-decoder the encoder runs.
        pooling: as `Embedder`.
        batch_size: rows that run at once.
        chat: a row's `prompt` is a user message, for the chat template, after `system`.
    """

    name = "embed"

    def __init__(
        self,
        model: Model[Any],
        tokenizer: Tokenizer | None,
        *,
        pooling: Pooling = "mean",
        batch_size: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        rows = checked_batch_size(batch_size, BATCH_ROWS)
        self._embedder = Embedder(model, model.config.context_length, pooling, rows=rows)
        super().__init__(self._embedder.rows)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)

    def read(self, row: RawRow) -> Int[np.ndarray, " T"]:
        ids = self._prompts.ids(checked_row(RowPrompt, row.mapping(EMBED_KEYS)))
        self._embedder.check_length("prompt", ids)
        return ids

    def size(self, item: Int[np.ndarray, " T"]) -> int:
        return len(item)

    def run(self, items: list[np.ndarray]) -> Sequence[np.ndarray]:
        return self._embedder.embed_batch(items)

    def output(
        self, row: RawRow, item: Int[np.ndarray, " T"], result: Float[np.ndarray, " D"]
    ) -> BatchOutput:
        if not np.isfinite(result).all():
            return error_output(row, NonFiniteError(NOT_FINITE))
        return EmbeddedRow(
            index=row.index,
            id=row.row_id,
            prompt_tokens=len(item),
            embedding=result.tolist(),
        )
