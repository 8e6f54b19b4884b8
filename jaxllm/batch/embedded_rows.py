"""`RowEmbedder`: embeddings of many rows, pooled states of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.embedder import Embedder, Pooling
from jaxllm.batch.memory import Prediction
from jaxllm.batch.row_prompts import PromptReader, RowPrompt, checked_row
from jaxllm.batch.rows import BatchOutput, RawRow, error_output
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.tokenizers.tokenizer import Tokenizer

EMBED_KEYS = frozenset(field.name for field in dataclasses.fields(RowPrompt))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedRow(BatchOutput):
    """Embedding of a row's prompt."""

    embedding: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "embedding": self.embedding}


class RowEmbedder:
    """Embeds rows: mappings with one of `prompt`, `messages` and `input_ids`.

    Args:
        model: with or without a head; of an encoder-decoder the encoder runs.
        pooling: as `Embedder`.
        batch_size: rows that run at once.
        chat: a row's `prompt` is a user message, for the chat template, after `system`.
    """

    memory: Sequence[Prediction] = ()

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None,
        *,
        pooling: Pooling = "mean",
        batch_size: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self._embedder = Embedder(model, model.config.context_length, pooling, rows=batch_size)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)
        self.counts = BatchCounts()

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Results, those of the longest rows first."""
        counts = self.counts = BatchCounts()
        checked: list[tuple[RawRow, Any]] = []
        for row in rows:
            try:
                ids = self._prompts.ids(checked_row(RowPrompt, row.mapping(EMBED_KEYS)))
                self._embedder.check_length("prompt", ids)
                checked.append((row, ids))
            except JaxLLMError as error:
                counts.add_output(output := error_output(row, error))
                yield output
        counts.work = sum(len(ids) for _, ids in checked)

        def run(batch: list[tuple[RawRow, Any]]) -> Sequence[Any]:
            counts.add_call(f"embed {len(batch)} rows")
            return self._embedder.embed([ids for _, ids in batch])

        for i, vector in run_in_batches(
            run, checked, self._embedder.rows, length=lambda item: len(item[1])
        ):
            row, ids = checked[i]
            counts.work_done += len(ids)
            output = EmbeddedRow(
                index=row.index,
                id=row.row_id,
                prompt_tokens=len(ids),
                embedding=vector.tolist(),
            )
            counts.add_output(output)
            yield output
