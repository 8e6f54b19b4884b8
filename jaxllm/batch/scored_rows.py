"""`RowScorer`: log-likelihoods of the completions of many rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from jaxllm.batch.row_prompts import PromptReader, RowPrompt, checked_row
from jaxllm.batch.row_task import RowTask, checked_batch_size
from jaxllm.batch.rows import BatchOutput, RawRow, error_output
from jaxllm.common.errors import InputError, NonFiniteError
from jaxllm.generation.inputs.padded_batch import checked_ids
from jaxllm.generation.scoring import Pair, batch_scorer, make_pair
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers.tokenizer import Tokenizer

DEFAULT_ROWS = 32


@dataclasses.dataclass(frozen=True)
class ScoreInput(RowPrompt):
    """A row to score."""

    completion: Annotated[str | list[int] | None, "a text or a list of token ids"] = None


SCORE_KEYS = frozenset(field.name for field in dataclasses.fields(ScoreInput))
SCORE_RESULTS = ("log_likelihood", "is_greedy", "token_log_probs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredRow(BatchOutput):
    """Log-likelihood of a row's completion, given its prompt."""

    log_likelihood: float
    is_greedy: bool
    """True if greedy search would generate the completion."""
    token_log_probs: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", *SCORE_RESULTS)}


class RowScorer(RowTask[Pair, tuple[np.ndarray, ...]]):
    """Scores rows: mappings with one of `prompt`, `messages` and `input_ids`, and a `completion`.

    The result is that of `jaxllm.score` on the row's tokens. For a causal model, prompt and
    completion are tokenized as one text; tokens that both of them share belong to the completion.
    After `messages`, and for an encoder-decoder, the completion is tokenized alone. No end token is
    added.

    Args:
        batch_size: rows that are scored at once.
        chat: a row's `prompt` is a user message, for the chat template, after `system`.
    """

    name = "score"

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer | None,
        *,
        batch_size: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self._model, self._tokenizer = checked_generative(model, "score"), tokenizer
        super().__init__(checked_batch_size(batch_size, DEFAULT_ROWS))
        self._score = batch_scorer(model)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)

    def read(self, row: RawRow) -> Pair:
        row_input = checked_row(ScoreInput, row.mapping(SCORE_KEYS))
        prompt, completion = self._prompt_ids(row_input), self._completion(row_input)
        if completion is None:
            prompt, completion = self._split(row_input)
        return make_pair(self._model, row.index, prompt, completion)

    def size(self, item: Pair) -> int:
        return item.size

    def run(self, items: list[Pair]) -> Sequence[tuple[np.ndarray, ...]]:
        return self._score(items)

    def output(self, row: RawRow, item: Pair, result: tuple[np.ndarray, ...]) -> BatchOutput:
        log_probs, is_best, is_finite = (x[: len(item.completion)] for x in result)
        if not is_finite.all():
            reason = (
                "the model's logits are NaN or infinite; check the weights, or use --dtype float32"
            )
            return error_output(row, NonFiniteError(reason))
        return ScoredRow(
            index=row.index,
            id=row.row_id,
            prompt_tokens=item.size - len(item.completion) + 1,
            log_likelihood=float(log_probs.sum(dtype=np.float32)),
            is_greedy=bool(is_best.all()),
            token_log_probs=log_probs.astype(float).tolist(),
        )

    def _completion(self, row: ScoreInput) -> Int[np.ndarray, " C"] | None:
        """The completion's tokens, where they do not depend on the prompt."""
        if row.completion is None or len(row.completion) == 0:
            raise InputError("completion: a row to score has one, and it is not empty")
        ids = row.completion
        if isinstance(ids, str):
            if self._tokenizer is None:
                raise InputError("completion: this model has no tokenizer; give token ids")
            if not self._model.is_encoder_decoder and self._prompts.is_text(row):
                return None
            ids = self._tokenizer.encode(ids, add_special_tokens=False)
        return checked_ids("completion", np.array([ids]), self._model.config.vocab_size)[0]

    def _prompt_ids(self, row: ScoreInput) -> Int[np.ndarray, " T"]:
        """The prompt's tokens. A causal model continues them with the completion, so they have no
        end token; an encoder reads the end token that its tokenizer adds."""
        return self._prompts.ids(row, ends=self._model.is_encoder_decoder)

    def _split(self, row: ScoreInput) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and completion of one text: the completion begins where the tokens differ from
        those of the prompt alone."""
        assert self._tokenizer is not None
        assert isinstance(row.completion, str)
        prompt = self._prompt_ids(row)
        whole = self._prompt_ids(dataclasses.replace(row, prompt=f"{row.prompt}{row.completion}"))
        shorter = min(len(prompt), len(whole))
        differs = np.flatnonzero(prompt[:shorter] != whole[:shorter])
        start = int(differs[0]) if differs.size else shorter
        return whole[:start], whole[start:]
