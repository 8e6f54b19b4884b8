"""Rows that need no slots: they are scored or embedded, in batches of similar length."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache, partial
from os import PathLike
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.batch import row_window
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import (
    BatchOutput,
    PromptReader,
    RawRow,
    RowPrompt,
    checked_row,
    error_output,
)
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.common.arguments import checked_iterable, is_integer
from jaxllm.common.errors import (
    InputError,
    JaxLLMError,
    NonFiniteError,
    UnsupportedError,
    quoted,
    warn,
)
from jaxllm.common.progress import progress_phase
from jaxllm.generation.inputs.arguments import (
    SMALLEST_BUCKET,
    checked_ids,
    padded_rows,
    run_in_batches,
)
from jaxllm.generation.inputs.values import bucket
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
from jaxllm.models.embedding import NORMALIZE, EmbeddingRecipe, text_vectors
from jaxllm.models.model import Model
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import row_shards, use_mesh
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.vocabulary import NO_MAX_LENGTH

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
NOT_FINITE = "are NaN or infinite; check the weights, or use --dtype float32"
Pooling = Literal["auto", "mean", "last", "cls"]
"""How the states of a text's tokens become one vector: their mean, the last token's or the first
one's; "auto": as the checkpoint states, else the mean."""
_KINDS = {"mean": ("mean",), "last": ("lasttoken",), "cls": ("cls",)}
"""`EmbeddingRecipe.pooling` by the names of `Pooling`."""


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
        """Outputs of each window of rows: wrong rows first, then the others, the longest first."""
        counts = self.counts = BatchCounts()
        rows = iter(rows)
        while window := list(itertools.islice(rows, row_window.WINDOW)):
            counts.rows_read += len(window)
            checked: list[tuple[RawRow, T]] = []
            for row in window:
                try:
                    checked.append((row, self.read(row)))
                except JaxLLMError as error:
                    counts.add_output(output := error_output(row, error))
                    yield output
            yield from self._results(checked)

    def _results(self, rows: Sequence[tuple[RawRow, T]]) -> Iterator[BatchOutput]:
        """Outputs of checked rows."""
        counts, items = self.counts, [item for _, item in rows]
        counts.work += sum(map(self._size, items))

        def run(batch: list[T]) -> Sequence[R]:
            counts.doing = f"computing {len(batch)} rows at once"
            results = self._run(batch)
            counts.add_call(f"{self.name} {len(batch)} rows")
            return results

        results = run_in_batches(
            run, items, self._batch_size, length=self._size, on_halving=counts.add_halving
        )
        for i, result in results:
            row, item = rows[i]
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
        if model.is_encoder_decoder and self._tokenizer is not None:
            for name in ("prompt", "completion"):
                if isinstance(text := getattr(row_input, name), str):
                    self._tokenizer.check_not_blank(text, name)
            if isinstance(row_input.completion, str):
                model = self._with_language(row_input.tgt_lang)
        # A causal model continues the prompt's tokens with the completion, so they have no end
        # token; an encoder reads the end token that its tokenizer adds.
        ends = model.is_encoder_decoder
        encode = Tokenizer.encode if ends else Tokenizer.encode_beginning
        prompt = self._prompts.ids(row_input, encode)
        completion = self._completion(row_input, model)
        if completion is None:
            prompt, completion = self._split(row_input)
        return make_pair(model, row.index, prompt, completion)

    def output(self, row: RawRow, item: Pair, result: tuple[np.ndarray, ...]) -> BatchOutput:
        log_probs, is_best, is_finite = (x[: len(item.completion)] for x in result)
        if not is_finite.all():
            return error_output(row, NonFiniteError(f"the model's logits {NOT_FINITE}"))
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
            raise InputError("completion: has no text or token ids; it must not be empty")
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


TextTokens = tuple[Int[np.ndarray, " T"], int]
"""The tokens of a text, and how many at its beginning are not pooled."""


def _size(text: TextTokens) -> int:
    return len(text[0])


class RowEmbedder(RowTask[TextTokens, np.ndarray]):
    """Embeds rows: mappings with one of `prompt`, `messages` and `input_ids`.

    Args:
        model: with or without a head; of an encoder-decoder the encoder runs.
        pooling, normalize: as `Embedder`.
        batch_size: rows that run at once.
        prompt_name, prompt: as for `embed`, for rows whose `prompt` is a text.
        chat: a row's `prompt` is a user message, for the chat template, after `system`.
    """

    name = "embed"

    def __init__(
        self,
        model: Model[Any],
        tokenizer: Tokenizer | None,
        *,
        pooling: Pooling = "auto",
        normalize: bool | None = None,
        batch_size: int | None = None,
        chat: bool = False,
        system: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> None:
        rows, context = checked_batch_size(batch_size, EMBEDDED_ROWS), model.config.context_length
        options: Any = {"rows": rows, "normalize": normalize, "tokenizer": tokenizer}
        self.embedder = Embedder(model, context, pooling, **options)
        super().__init__(self.embedder.rows, self.embedder.embed_batch, _size)
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)
        self._prompt, self._tokenizer = self.embedder.recipe.prompt(prompt_name, prompt), tokenizer
        self._asks_for_prompt, self._unpooled = (prompt_name or prompt) is not None, 0

    def read(self, row: RawRow) -> TextTokens:
        row_input, self._unpooled = checked_row(RowPrompt, row.mapping(EMBED_KEYS)), 0
        if self._asks_for_prompt and not self._prompts.is_text(row_input):
            raise InputError(f"prompt_name: has no effect on {row_input.prompt_key}; leave it out")
        if row_input.prompt is not None and self._tokenizer is not None:
            self._tokenizer.check_not_blank(row_input.prompt, "prompt")
        ids = self._prompts.ids(row_input, self._encode)
        self.embedder.check_length("prompt", ids)
        return ids, self._unpooled

    def _encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        (ids,), self._unpooled, cut = self.embedder.encode([text], self._prompt, tokenizer)
        self.counts.cut_texts += cut
        return ids

    def output(self, row: RawRow, item: TextTokens, result: Float[np.ndarray, " D"]) -> BatchOutput:
        if not np.isfinite(result).all():
            return error_output(row, NonFiniteError(f"the model's hidden states {NOT_FINITE}"))
        return EmbeddedRow(
            index=row.index, id=row.row_id, prompt_tokens=len(item[0]), embedding=result.tolist()
        )


class Embedder:
    """Pools the last hidden states of a text (of the encoder, for an encoder-decoder).

    Args:
        context: most tokens of a text; None: any number.
        pooling: see `Pooling`.
        rows: texts of one call of the program.
        normalize: divide vectors by their length; None: as the model's files say, else True.
        tokenizer: has the most tokens of a text, if the files of sentence-transformers do not.
    """

    def __init__(
        self,
        model: Model[Any],
        context: int | None,
        pooling: Pooling = "auto",
        *,
        rows: int | None = None,
        normalize: bool | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._model = with_rope_per_row(model)
        self._mesh, self._tokenizer = mesh_of(model), tokenizer
        self.recipe = _chosen_recipe(model, pooling, normalize)
        self.context, self.max_length = context, NO_MAX_LENGTH
        if self.recipe.files:
            own = NO_MAX_LENGTH if tokenizer is None else tokenizer.model_max_length
            own = min(own, model.config.context_length or own)
            self.max_length = self.recipe.max_seq_length or own
            self.context = min(context or self.max_length, self.max_length)
        self._options: Any = {"pooling": self.recipe.pooling, "steps": self.recipe.steps}
        layers = list(self.recipe.dense.values())
        self._dense = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), layers)
        self.width = model.config.value("width", 0) * len(self.recipe.pooling)
        for path, layer in self.recipe.dense.items():
            size, expected = layer["linear.weight"].shape
            if expected != self.width:
                raise UnsupportedError(
                    f"{path}: takes vectors of {expected} values, but those before it have "
                    f"{self.width}; correct its files, or pool as they say"
                )
            self.width = size
        self._programs: dict[tuple[int, ...], Any] = {}
        self._locks: defaultdict[tuple[int, ...], threading.Lock] = defaultdict(threading.Lock)
        shards = row_shards(self._mesh)
        self.rows = -(-(rows or EMBEDDED_ROWS) // shards) * shards

    def programs(self) -> dict[str, Callable[[], object]]:
        """Functions that compile the program of each bucket of lengths, by name."""
        assert self.context is not None
        shapes, width = {}, SMALLEST_BUCKET
        while width <= bucket(self.context, SMALLEST_BUCKET):
            shapes[f"embed {self.rows} x {width}"] = self.rows, width
            width *= 2
        return {name: partial(self._compile, *shape) for name, shape in shapes.items()}

    def _compile(self, rows: int, width: int) -> None:
        """Compiles the program for texts of this shape, once, in the thread that needs it first."""
        with self._locks[rows, width]:
            if (rows, width) not in self._programs:
                tokens, mask = padded_rows([FILLER] * rows, width)
                arguments = {"pooled": mask, "dense": self._dense, **self._options}
                with use_mesh(self._mesh):
                    program = _pooled.lower(self._model, tokens, mask, **arguments).compile()
                self._programs[rows, width] = program

    def check_length(self, name: str, ids: Sized) -> None:
        """Raises InputError for a text that is empty or too long; `name` is its name."""
        if not 0 < len(ids) <= (self.context or len(ids)):
            raise InputError(f"{name}: has {len(ids)} tokens; expected 1 to {self.context}")

    def encode(
        self, texts: list[str], prompt: str, tokenize: Callable[..., Any]
    ) -> tuple[list[list[int]], int, int]:
        """Encodes texts after a prompt, and cuts them as sentence-transformers does.

        Args:
            tokenize: a tokenizer's call.

        Returns:
            Token ids; how many of them, at the beginning, are not pooled; how many texts were cut.
        """
        if self.recipe.do_lower_case:
            texts, prompt = [text.lower() for text in texts], prompt.lower()
        texts, unpooled = [prompt + text for text in texts], 0
        rows = list(tokenize(texts)["input_ids"])
        too_long = [number for number, ids in enumerate(rows) if len(ids) > self.max_length]
        for number in too_long:
            cut = tokenize([texts[number]], truncation=True, max_length=self.max_length)
            (rows[number],) = cut["input_ids"]
        if prompt and not self.recipe.include_prompt:
            assert self._tokenizer is not None
            (ids,) = tokenize([prompt])["input_ids"]
            unpooled = len(ids) - (ids[-1] in self._tokenizer.special_ids)
            if min(map(len, rows)) <= unpooled:
                raise InputError("prompt: leaves no token of the text, which is cut; shorten it")
        return rows, unpooled, len(too_long)

    def embed(self, texts: Sequence[Any], unpooled: int = 0) -> list[Float[np.ndarray, " D"]]:
        """The embeddings of texts, given as token ids, without the first `unpooled` tokens.

        Raises:
            InputError: a text is empty or too long.
            NonFiniteError: the hidden states of a text are NaN or infinite.
        """
        for number, ids in enumerate(texts):
            self.check_length(f"input[{number}]", ids)
        # Filled up to whole batches, for which `programs` has every program.
        full = [(np.asarray(ids), unpooled) for ids in texts]
        full += [(FILLER, 0)] * (-len(full) % self.rows)

        def embed_batch(texts: Sequence[TextTokens]) -> list[Float[np.ndarray, " D"]]:
            rows = len(texts) + -len(texts) % row_shards(self._mesh)
            self._compile(rows, bucket(max(map(_size, texts)), SMALLEST_BUCKET))
            return self.embed_batch(texts)

        results = dict(run_in_batches(embed_batch, full, self.rows, length=_size))
        for number in range(len(texts)):
            if not np.isfinite(results[number]).all():
                raise NonFiniteError(f"input[{number}]: the model's hidden states {NOT_FINITE}")
        return [results[number] for number in range(len(texts))]

    def embed_batch(self, texts: Sequence[TextTokens]) -> list[Float[np.ndarray, " D"]]:
        """The embeddings of texts that run at once, in a program for this number of texts.

        The number is rounded up to whole shards of the rows. An embedding is NaN if the model's
        hidden states are not finite.
        """
        count = len(texts)
        texts = [*texts, *[(FILLER, 0)] * (-len(texts) % row_shards(self._mesh))]
        rows = [ids for ids, _ in texts]
        tokens, mask = padded_rows(rows)
        pooled = mask & (np.arange(mask.shape[1]) >= np.array([[skipped] for _, skipped in texts]))
        program = self._programs.get(tokens.shape, partial(_pooled, **self._options))
        with use_mesh(self._mesh):
            vectors = program(self._model, tokens, mask, pooled=pooled, dense=self._dense)
        return list(np.asarray(vectors))[:count]


def embed(
    model: Model[Any] | str | PathLike[str],
    texts: Iterable[str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    *,
    pooling: Pooling = "auto",
    normalize: bool | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> Float[np.ndarray, "N D"]:
    """Embeds texts: the vectors of ``jaxllm generate --embed`` and of the server's /v1/embeddings.

    A vector is pooled from the last hidden states of a text's tokens, and divided by its length. A
    model whose folder has the modules.json of sentence-transformers embeds as its files say: with
    their pooling, dense layers, normalization and default prompt, and texts longer than
    max_seq_length are cut. `set_progress` shows how many texts are embedded.

    Args:
        model: a model with or without a head, or what `jaxllm.load` takes. The encoder of an
            encoder-decoder runs.
        texts: strings, lists of token ids, lists of messages, or rows with one of `prompt`,
            `messages` and `input_ids`.
        tokenizer: the model's; needed for texts with a model that is loaded already.
        pooling: "mean" of all tokens, "last" or "cls" for the last or the first token. "auto" is
            what the checkpoint states, as GGUF files do, else the mean.
        normalize: divide vectors by their length. None: as modules.json says, else True.
        prompt_name: the prompt of config_sentence_transformers.json to put before each text. None:
            the default one of that file, if any.
        prompt: a text to put before each text instead.
        batch_size: texts that run at once (8).
        chat: a string is a user message, for the model's chat template, after `system`.

    Returns:
        float32 [N, D]: a vector for each text.

    Raises:
        UnsupportedError: modules.json names what jaxllm does not read.
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
    options: Any = {"normalize": normalize, "prompt_name": prompt_name, "prompt": prompt}
    options |= {"batch_size": batch_size, "chat": chat, "system": system}
    task = RowEmbedder(loaded, tokenizer, pooling=pooling, **options)
    vectors = np.zeros((len(rows), task.embedder.width), np.float32)
    with progress_phase("embedding", lambda done, total: f"{done} of {total} texts") as update:
        for done, output in enumerate(task.answer(map(RawRow, *[range(len(rows))] * 2, rows)), 1):
            if not isinstance(output, EmbeddedRow):
                kind = NonFiniteError if output.error_kind == "NonFiniteError" else InputError
                raise kind(f"texts[{output.index}]: {output.error}")
            vectors[output.index] = output.embedding
            if update is not None:
                update("texts", done, len(rows))
    if cut := task.counts.cut_texts:
        most = task.embedder.max_length
        warn(f"embed: {cut} of {len(rows)} texts are longer than {most} tokens, and were cut")
    return vectors


def _chosen_recipe(model: Model[Any], pooling: str, normalize: bool | None) -> EmbeddingRecipe:
    """What the model's files say, with the pooling and the normalization that are asked for."""
    card = model.card
    recipe = EmbeddingRecipe() if card is None or card.embedding is None else card.embedding
    if recipe.problem is not None:
        raise UnsupportedError(recipe.problem)
    kinds, steps, found = recipe.pooling, recipe.steps, "found"
    if pooling == "auto" and not recipe.files and card is not None and card.pooling != "none":
        pooling, found = card.pooling or "mean", "the checkpoint states"
    if pooling != "auto" and pooling not in _KINDS:
        raise UnsupportedError(f"pooling: {found} {quoted(pooling)}; give mean, last or cls")
    while normalize is not None and steps[-1:] == (NORMALIZE,):
        steps = steps[:-1]
    steps = (*steps, NORMALIZE) if normalize else steps
    return dataclasses.replace(recipe, pooling=_KINDS.get(pooling, kinds), steps=steps)


@partial(jax.jit, static_argnames=("pooling", "steps"))
def _pooled(
    model: Any,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    pooled: Bool[Array, "B T"],
    dense: Any,
    pooling: tuple[str, ...],
    steps: tuple[str, ...],
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
    return text_vectors(x, pooled, dense, pooling=pooling, steps=steps)
