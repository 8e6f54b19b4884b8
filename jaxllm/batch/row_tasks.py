"""Rows that need no slots: they are scored or embedded, in batches of similar length."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache, partial
from os import PathLike
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import (
    BatchOutput,
    PromptReader,
    RawRow,
    RowPrompt,
    checked_row,
    error_output,
)
from jaxllm.common.arguments import checked_iterable
from jaxllm.common.errors import (
    InputError,
    JaxLLMError,
    NonFiniteError,
    UnsupportedError,
    quoted,
)
from jaxllm.common.progress import progress_phase
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, checked_ids, padded_rows
from jaxllm.generation.inputs.values import bucket, is_integer
from jaxllm.generation.scoring import (
    Pair,
    batch_scorer,
    make_pair,
    text_pair,
    with_target_language,
)
from jaxllm.loading import load
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.models.decoder_only import with_rope_per_row
from jaxllm.models.model import Model
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import row_shards, use_mesh
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.vocabulary import check_not_blank

T = TypeVar("T")
R = TypeVar("R")
SCORED_ROWS = 32
"""Rows that are scored at once, by default."""
EMBEDDED_ROWS = 8
"""Texts that are embedded at once, by default."""
SCORE_RESULTS = ("log_likelihood", "is_greedy", "token_log_probs")
EMBED_KEYS = frozenset(field.name for field in dataclasses.fields(RowPrompt))
EMBED_RESULTS = ("embedding",)
FILLER = np.zeros(1, np.int32)
"""Token ids of the texts that fill up a batch."""
NOT_FINITE = (
    "the model's hidden states are NaN or infinite; check the weights, or use --dtype float32"
)
Pooling = Literal["auto", "mean", "last", "cls"]
"""How the states of a text's tokens become one vector: their mean, the last token's or the first
one's; "auto": as the checkpoint states, else the mean."""


def checked_batch_size(batch_size: int | None, default: int) -> int:
    """The number of rows that run at once.

    Raises:
        InputError: not an integer from 1 on.
    """
    if batch_size is None:
        return default
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more rows, found {quoted(batch_size)}")
    return batch_size


class RowTask(ABC, Generic[T, R]):
    """Answers rows that need no slots, in batches of rows of similar length.

    Args:
        batch_size: rows that run at once.
        run: gives the results of a batch.
        size: number of tokens that run for an item.

    Attributes:
        name: for the counter of calls.
        counts: counters of the last call of `answer`.
    """

    name: ClassVar[str]
    memory: Sequence[Prediction] = ()

    def __init__(
        self, batch_size: int, run: Callable[[list[T]], Sequence[R]], size: Callable[[T], int]
    ) -> None:
        self._batch_size, self._run, self._size = batch_size, run, size
        self.counts = BatchCounts()

    @abstractmethod
    def read(self, row: RawRow) -> T:
        """What runs for a row.

        Raises:
            JaxLLMError: the row is wrong.
        """

    @abstractmethod
    def output(self, row: RawRow, item: T, result: R) -> BatchOutput:
        """The output of a row."""

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Outputs: wrong rows first, then the others, the longest first."""
        counts = self.counts = BatchCounts()
        checked: list[tuple[RawRow, T]] = []
        for row in rows:
            try:
                checked.append((row, self.read(row)))
            except JaxLLMError as error:
                counts.add_output(output := error_output(row, error))
                yield output
        items = [item for _, item in checked]
        counts.work = sum(map(self._size, items))

        def run(batch: list[T]) -> Sequence[R]:
            counts.doing = f"computing {len(batch)} rows at once"
            results = self._run(batch)
            counts.add_call(f"{self.name} {len(batch)} rows")
            return results

        results = run_in_batches(
            run, items, self._batch_size, length=self._size, on_halving=counts.add_halving
        )
        for i, result in results:
            row, item = checked[i]
            counts.work_done += self._size(item)
            counts.add_output(output := self.output(row, item, result))
            yield output


@dataclasses.dataclass(frozen=True)
class ScoreInput(RowPrompt):
    """A row to score."""

    completion: Annotated[str | list[int] | None, "a text or a list of token ids"] = None
    tgt_lang: str | None = None
    """Language of the completion's text, for a translation model."""


SCORE_KEYS = frozenset(field.name for field in dataclasses.fields(ScoreInput))


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
    added. For an encoder-decoder the completion is a target of its tokenizer: where generation
    begins with a language (NLLB, M2M100, mBART-50), its token is the first, and is scored too.

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
        rows = checked_batch_size(batch_size, SCORED_ROWS)
        super().__init__(rows, batch_scorer(model), lambda pair: pair.size)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)
        self._with_language = cache(partial(with_target_language, model, tokenizer))

    def read(self, row: RawRow) -> Pair:
        row_input, model = checked_row(ScoreInput, row.mapping(SCORE_KEYS)), self._model
        if model.is_encoder_decoder:
            for name in ("prompt", "completion"):
                if isinstance(text := getattr(row_input, name), str):
                    check_not_blank(text, name)
            if self._tokenizer is not None and isinstance(row_input.completion, str):
                model = self._with_language(row_input.tgt_lang)
        prompt, completion = self._prompt_ids(row_input), self._completion(row_input, model)
        if completion is None:
            prompt, completion = self._split(row_input)
        return make_pair(model, row.index, prompt, completion)

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

    def _completion(self, row: ScoreInput, model: Any) -> Int[np.ndarray, " C"] | None:
        """The completion's tokens, where they do not depend on the prompt."""
        if row.completion is None or len(row.completion) == 0:
            raise InputError("completion: a row to score has one, and it is not empty")
        ids = row.completion
        if isinstance(ids, str):
            if self._tokenizer is None:
                raise InputError("completion: this model has no tokenizer; give token ids")
            if not model.is_encoder_decoder and self._prompts.is_text(row):
                return None
            ids = self._tokenizer.encode_target(ids, model.generation_config)
        elif row.tgt_lang is not None:
            raise InputError("tgt_lang: has no effect on a completion of token ids; leave it out")
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
        tokenizer = self._tokenizer.with_languages(row.src_lang, row.tgt_lang)
        size = self._model.config.vocab_size
        ids = text_pair(self._model, tokenizer, 0, row.prompt or "", row.completion)
        prompt, completion = (checked_ids("prompt", np.array([x], int), size)[0] for x in ids)
        return prompt, completion


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
        pooling: Pooling = "auto",
        batch_size: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        rows = checked_batch_size(batch_size, EMBEDDED_ROWS)
        self._embedder = Embedder(model, model.config.context_length, pooling, rows=rows)
        super().__init__(self._embedder.rows, self._embedder.embed_batch, len)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)

    def read(self, row: RawRow) -> Int[np.ndarray, " T"]:
        row_input = checked_row(RowPrompt, row.mapping(EMBED_KEYS))
        if row_input.prompt is not None:
            check_not_blank(row_input.prompt, "prompt")
        ids = self._prompts.ids(row_input)
        self._embedder.check_length("prompt", ids)
        return ids

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


class Embedder:
    """Pools the last hidden states of a text (of the encoder, for an encoder-decoder).

    Args:
        context: most tokens of a text; None: any number.
        pooling: see `Pooling`; the attribute has what "auto" stands for.
        rows: texts of one call of the program.
    """

    def __init__(
        self,
        model: Model[Any],
        context: int | None,
        pooling: Pooling = "auto",
        *,
        rows: int | None = None,
    ) -> None:
        self._model = with_rope_per_row(model)
        self._mesh = mesh_of(model)
        self._context, self.pooling = context, _chosen_pooling(model, pooling)
        self._programs: dict[tuple[int, ...], Any] = {}
        shards = row_shards(self._mesh)
        self.rows = -(-(rows or EMBEDDED_ROWS) // shards) * shards

    def warm_up(self) -> None:
        """Compiles the program of each bucket of lengths, without running it."""
        assert self._context is not None
        width = SMALLEST_BUCKET
        while width <= bucket(self._context, SMALLEST_BUCKET):
            tokens, mask = padded_rows([FILLER] * self.rows, width)
            with use_mesh(self._mesh):
                program = _pooled.lower(self._model, tokens, mask, pooling=self.pooling)
                self._programs[tokens.shape] = program.compile()
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
        program = self._programs.get(tokens.shape, partial(_pooled, pooling=self.pooling))
        with use_mesh(self._mesh):
            pooled = program(self._model, tokens, mask)
        return list(np.asarray(pooled)[: len(texts)])


def embed(
    model: Model[Any] | str | PathLike[str],
    texts: Iterable[str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    *,
    pooling: Pooling = "auto",
    batch_size: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> Float[np.ndarray, "N D"]:
    """Embeds texts: the vectors of ``jaxllm generate --embed`` and of the server's /v1/embeddings.

    A vector is pooled from the last hidden states of a text's tokens, and divided by its length.
    `set_progress` shows how many texts are embedded.

    Args:
        model: a model with or without a head, or what `jaxllm.load` takes. The encoder of an
            encoder-decoder runs.
        texts: strings, lists of token ids, lists of messages, or rows with one of `prompt`,
            `messages` and `input_ids`.
        tokenizer: the model's; needed for texts with a model that is loaded already.
        pooling: "mean" of all tokens, "last" or "cls" for the last or the first token. "auto" is
            what the checkpoint states, as GGUF files do, else the mean.
        batch_size: texts that run at once (8).
        chat: a string is a user message, for the model's chat template, after `system`.

    Returns:
        float32 [N, D]: a vector of length 1 for each text.

    Raises:
        InputError: a text is empty or longer than the model's context; the message has its number,
            from 0 on.
        NonFiniteError: the hidden states of a text are NaN or infinite.
    """
    rows: list[Any] = list(checked_iterable(texts, "texts", "a list of texts"))
    for i, each in enumerate(rows):
        if isinstance(each, Sequence) and each and isinstance(each[0], Mapping):
            rows[i] = {"messages": each}
    loaded: Any = model
    if isinstance(model, str | PathLike):
        loaded, own = load(model)
        tokenizer = own if tokenizer is None else tokenizer
    task = RowEmbedder(
        loaded, tokenizer, pooling=pooling, batch_size=batch_size, chat=chat, system=system
    )
    vectors = np.zeros((len(rows), loaded.config.value("width", 0)), np.float32)
    with progress_phase("embedding", lambda done, total: f"{done} of {total} texts") as update:
        for done, output in enumerate(task.answer(map(RawRow, *[range(len(rows))] * 2, rows)), 1):
            if not isinstance(output, EmbeddedRow):
                kind = NonFiniteError if output.error_kind == "NonFiniteError" else InputError
                raise kind(f"texts[{output.index}]: {output.error}")
            vectors[output.index] = output.embedding
            if update is not None:
                update("texts", done, len(rows))
    return vectors


def _chosen_pooling(model: Model[Any], pooling: str) -> str:
    """The pooling that "auto" stands for, or the one that is asked for."""
    is_auto = pooling == "auto"
    stated = model.card.pooling if is_auto and model.card is not None else None
    chosen = pooling if not is_auto else "mean" if stated in (None, "none") else stated
    if chosen not in get_args(Pooling)[1:]:
        found = "the checkpoint states" if is_auto else "found"
        raise UnsupportedError(f"pooling: {found} {quoted(chosen)}; give mean, last or cls")
    return chosen


@partial(jax.jit, static_argnames=("pooling",))
def _pooled(
    model: Any, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, pooling: str
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
        x = x[jnp.arange(x.shape[0]), 0 if pooling == "cls" else jnp.sum(mask, axis=1) - 1]
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    # Divided by an infinite norm, what is finite would be 0; the smallest norm is torch's.
    return jnp.where(jnp.isfinite(norm), x / jnp.maximum(norm, 1e-12), jnp.nan)
