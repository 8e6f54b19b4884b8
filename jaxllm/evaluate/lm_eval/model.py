"""`JaxLM`: a model of jaxllm behind the interface of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, cast

import jax
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    DEFAULT_MAX_LENGTH,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import jaxllm
from jaxllm.batch import BatchGenerator
from jaxllm.batch.generator import check_model
from jaxllm.batch.rows import RawRow
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, TemplateError, UnsupportedError, warn
from jaxllm.common.progress import Reporter
from jaxllm.generation.scoring import stream_scores, with_target_language
from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Model
from jaxllm.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""Strings of a request (None: a window of a longer text), and ids of context and continuation."""
DEFAULT_BATCH_SIZE = 32
UNLIMITED = 10**29
"""transformers writes 1e30 as the `model_max_length` of a tokenizer without a limit."""


class JaxLM(TemplateLM):
    """A causal or encoder-decoder model that answers the requests of lm-evaluation-harness.

    Prompts, truncation and scores are those of the harness's backend for transformers, "hf". An
    encoder-decoder reads the context with its encoder. Pairs are scored in batches of similar
    length, padded to powers of two; generation runs in the batch engine's slots.

    Args:
        pretrained: a folder, .gguf file or Hub id for `jaxllm.load`; or a model, with `tokenizer`.
        tokenizer: a tokenizer or its folder; None: that of `pretrained`.
        dtype, param_dtype, revision: as for `jaxllm.load`; a `dtype` of "auto" means None.
        batch_size: pairs that are scored, and requests that are decoded, at once. "auto": 32 pairs,
            and the default slots of `BatchGenerator`. Fewer are used where memory runs out.
        max_batch_size: maximum of an automatic batch size.
        max_length: tokens of context and continuation; longer ones lose their start. None: the
            model's context, or the tokenizer's `model_max_length`, or 2048.
        max_gen_toks: new tokens of a request that sets none.
        src_lang, tgt_lang: the language of contexts, and the language in which the model writes,
            for translation models; None: the languages of the tokenizer.
        prefix_token_id: first token of a text without context. None: BOS, or else EOS.
        add_bos_token: add special tokens to a text, such as BOS. None: as the tokenizer does.
        enable_thinking: variable of the chat template; if True, only answers are generated, and
            `think_end_token` must be set.
        think_end_token: text after which an answer begins, for models that think first.
        seed: seed of sampling, for requests that have none.
        device: has no effect, since JAX_PLATFORMS chooses; the harness's command always gives one.
        name: of the model, in the results; None: `pretrained`, or its class.
        reporter: shows progress on stderr; None: a new one.

    Raises:
        InputError: an argument that does not exist, or has a wrong value.
        UnsupportedError: the model has no tokenizer or no language-model head.
        JaxLLMError: as `jaxllm.load`.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        pretrained: str | PathLike[str] | GenerativeModel,
        *,
        tokenizer: Tokenizer | str | PathLike[str] | None = None,
        dtype: str | None = None,
        param_dtype: str | None = None,
        revision: str | None = None,
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        seed: int = 0,
        device: str | None = None,
        name: str | None = None,
        reporter: Reporter | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            known = ", ".join(list(inspect.signature(JaxLM).parameters)[:-2])
            names = ", ".join(map(repr, sorted(unknown)))
            raise InputError(f"model_args: unknown {names}; the known ones are {known}")
        self._reporter = Reporter() if reporter is None else reporter
        if device is not None:
            self._reporter.say(f"device: {jax.default_backend()}, as JAX_PLATFORMS says")
        self._name = name or str(
            pretrained if isinstance(pretrained, str | PathLike) else type(pretrained).__name__
        )
        model, own_tokenizer = load_pretrained(
            pretrained,
            self._reporter,
            dtype=None if dtype == "auto" else dtype,
            param_dtype=param_dtype,
            revision=revision,
        )
        if isinstance(tokenizer, str | PathLike):
            tokenizer = load_tokenizer(tokenizer)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise UnsupportedError(f"{self._name}: has no tokenizer, which tasks need")
        check_model(model)
        tokenizer = tokenizer.with_languages(src_lang, tgt_lang)
        if model.is_encoder_decoder:
            model = with_target_language(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.backend = "seq2seq" if model.is_encoder_decoder else "causal"
        self.batch_size, self._slots = batch_sizes(batch_size, max_batch_size)
        self.max_gen_toks = max_gen_toks
        self.max_length = length_limit(model, tokenizer, max_length)
        self._prefix_token_id, self._add_bos_token = prefix_token_id, add_bos_token
        self._think_end_token, self._seed = think_end_token, seed
        if enable_thinking and think_end_token is None:
            raise InputError("think_end_token: enable_thinking needs it, to find the answer")
        self._thinks = enable_thinking

    @property
    def eot_token_id(self) -> int:
        """EOS, at which the answers end."""
        return self._token(self.tokenizer.eos_token_id, "no EOS token")

    @property
    def prefix_token_id(self) -> int:
        """First token of a text without context."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id):
            if token is not None:
                return token
        return self._token(self.tokenizer.eos_token_id, "no BOS and no EOS: set prefix_token_id")

    def _token(self, token: int | None, problem: str) -> int:
        if token is None:
            raise InputError(f"{self._name}: the tokenizer has {problem}")
        return token

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's cache of requests."""
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, without special tokens if it already begins with the first. Without
        `add_special_tokens` it is a continuation, which an encoder-decoder's decoder reads."""
        if add_special_tokens is False and self.backend == "seq2seq":
            return self.tokenizer.encode_target(string, self.model.generation_config)
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = self._add_bos_token is not False
            add_special_tokens &= not has_bos_prefix(string, prefix)
        size = max(len(string.encode("utf-8", "replace")), 1)
        return self.tokenizer.encode(
            string, add_special_tokens=add_special_tokens, max_bytes=size, **kwargs
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, for the assistant's turn or to continue the last message."""
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            **({} if self._thinks is None else {"enable_thinking": self._thinks}),
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy search would generate it."""
        if self._thinks:
            names = ", ".join(sorted({str(request.task_name) for request in requests}))
            raise InputError(f"enable_thinking: {names} asks for log-likelihoods, not for answers")
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        pairs = [self._fitting(*request) for request in requests]
        longer = sum(
            len(prompt) < len(context)
            for (prompt, _), (_, context, _) in zip(pairs, requests, strict=True)
        )
        warn_of_truncation(longer, len(requests), self.max_length)
        prompts, completions = zip(*pairs, strict=True)
        answers: dict[int, tuple[float, bool]] = {}
        with counted(self._reporter, "log-likelihoods", len(requests)) as advance:
            for i, log_probs, is_greedy in stream_scores(
                self.model, prompts, completions, batch_size=self.batch_size
            ):
                answers[i] = float(log_probs.sum()), is_greedy
                if (strings := requests[i][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, answers[i])
                advance()
        return [answers[i] for i in range(len(requests))]

    def _fitting(
        self, strings: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Context and continuation without what `max_length` cuts from the start of the context."""
        size, limit = len(continuation), self.max_length
        if not 1 <= size <= limit:
            raise InputError(
                f"loglikelihood: the continuation {(strings or ('', 'of a window'))[1]!r:.60} has "
                f"{size} tokens, but there must be 1 to {limit} (max_length)"
            )
        if self.backend == "seq2seq":
            return context[-limit:], continuation
        return context[-(limit + 1 - size) :], continuation

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each whole text, in windows of `max_length` after the prefix token."""
        windows: list[TokenRequest] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            text = request.args[0]
            ids = self.tok_encode(text)
            if self.tokenizer.translates:  # the decoder reads it
                ids = [*self.tok_encode(text, add_special_tokens=False), self.eot_token_id]
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stop strings."""
        rows: list[GenerationRequest] = []
        longer = 0
        for request in requests:
            length, row = self._generation_request(request)
            rows.append(row)
            longer += len(row.input_ids) < length
        warn_of_truncation(longer, len(requests), self.max_length)
        end_text = self.tokenizer.decode([self.eot_token_id])
        answers: dict[int, str] = {}
        with counted(self._reporter, "answers", len(requests)) as advance:
            for i, ids in generate_until(
                self.model, self.tokenizer, rows, slots=self._slots, seed=self._seed
            ):
                answers[i] = postprocess_generated_text(
                    self.tokenizer.decode(ids, skip_special_tokens=True),
                    [*rows[i].settings.until, end_text],
                    self._think_end_token,
                )
                self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                advance()
        return [answers[i] for i in range(len(requests))]

    def _generation_request(self, request: Instance) -> tuple[int, GenerationRequest]:
        """The length of the prompt, and the request with what `max_length` leaves of it."""
        context, gen_kwargs = request.arguments
        settings = GenerationSettings.read(gen_kwargs, self.max_gen_toks)
        limit = self.max_length
        if self.backend == "causal":
            limit -= settings.max_new_tokens
        if limit < 1:
            raise InputError(
                f"max_gen_toks: {settings.max_new_tokens} new tokens leave none of a max_length of "
                f"{self.max_length} for the prompt"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return len(ids), GenerationRequest(ids[-limit:], settings)

    def get_model_info(self) -> dict[str, Any]:
        """Facts of the model for the harness's results."""
        model = cast(Model[Any], self.model)
        return {
            "model_name": self._name,
            "model_num_parameters": model.num_parameters(),
            "model_dtype": str(model.dtype),
            "jaxllm_version": jaxllm.__version__,
        }


def load_pretrained(
    pretrained: str | PathLike[str] | GenerativeModel, reporter: Reporter, **options: Any
) -> tuple[GenerativeModel, Tokenizer | None]:
    """Loads a model and its tokenizer; a model itself comes without one.

    Args:
        options: of `jaxllm.load`; those that are None are as if left out.
    """
    if isinstance(pretrained, str | PathLike):
        with reporter.phase(f"loading {pretrained}") as update:
            return jaxllm.load(pretrained, progress=update, **options)
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: has no effect on a model that is loaded; load it with it")
    return pretrained, None


def batch_sizes(batch_size: int | str | None, max_batch_size: int | None) -> tuple[int, int | None]:
    """Pairs that are scored at once, and slots (None: the batch engine's default).

    >>> batch_sizes("auto", None), batch_sizes("auto:4", 8), batch_sizes("16", None)
    ((32, None), (8, 8), (16, 16))
    """
    text = str("auto" if batch_size is None else batch_size)
    if text == "auto" or text.startswith("auto:"):
        return max_batch_size or DEFAULT_BATCH_SIZE, max_batch_size
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"batch_size: expected a positive integer or auto, found {batch_size!r}")
    return int(text), int(text)


def length_limit(model: GenerativeModel, tokenizer: Tokenizer, max_length: int | None) -> int:
    """Tokens that are read at once: `max_length`, the model's context, its tokenizer's, or 2048."""
    if max_length is None:
        limit: Any = model.config.context_length
        if limit is None:
            limit = tokenizer.settings.options.get("model_max_length")
        return int(limit) if is_integer(limit) and limit < UNLIMITED else DEFAULT_MAX_LENGTH
    positions = model.config.max_positions
    if not is_integer(max_length) or not 1 < max_length <= (positions or max_length):
        raise InputError(f"max_length: expected 2 to {positions or 'any'}, found {max_length!r}")
    return int(max_length)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    **variables: Any,
) -> str:
    """The text of a chat, as lm-eval's own backend makes it with transformers.

    Args:
        add_generation_prompt: append the start of the assistant's turn; if False, the text ends
            with the content of the last message, which the model continues.
        variables: further variables of the template.

    Raises:
        TemplateError: there is no template, or it fails, and not only because of a system message.
    """
    options = {
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
        **variables,
    }
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as failure:
        others = [message for message in messages if message["role"] != "system"]
        if tokenizer.chat_template is None or len(others) == len(messages):
            raise
        text = tokenizer.apply_chat_template(others, **options)
        warn(f"the chat template takes no system message, which is left out ({failure})")
        return text


@contextlib.contextmanager
def counted(reporter: Reporter, label: str, total: int) -> Generator[Callable[[], None]]:
    """Shows how many requests are done; a call of the function that it gives counts one."""
    start, done = time.perf_counter(), 0
    stop, describe = reporter.start(label)

    def advance() -> None:
        nonlocal done
        done += 1
        describe(f"{label}: {done} of {total}")

    try:
        yield advance
    finally:
        stop()
    reporter.say(f"{label}: {total} requests, {time.perf_counter() - start:.1f} s")


def warn_of_truncation(longer: int, total: int, max_length: int) -> None:
    """Warns that `longer` of `total` requests lose tokens, if any do."""
    if longer:
        warn(
            f"{longer} of {total} requests are longer than max_length ({max_length} tokens) and "
            "lose the start of their context"
        )


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """Settings of a `generate_until` request, read from its `gen_kwargs`."""

    until: tuple[str, ...]
    """Stop strings; the answer ends before the first of them."""
    max_new_tokens: int
    seed: int | None
    """None: the seed of the whole evaluation."""
    fields: Mapping[str, Any]
    """Other generation fields."""

    @classmethod
    def read(cls, gen_kwargs: Mapping[str, Any], default_new_tokens: int) -> Self:
        """Reads the settings as the harness's own backends do.

        A temperature above 0 samples unless `do_sample` is false. Fields that act on sampling alone
        are left out of a greedy request, where tasks often set them.

        >>> GenerationSettings.read({"until": ".", "max_tokens": 5, "top_p": 0.9}, 256)
        GenerationSettings(until=('.',), max_new_tokens=5, seed=None, fields={'do_sample': False})
        """
        fields: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), default_new_tokens)}
        until, seed = fields.pop("until"), fields.pop("seed", None)
        if not all(isinstance(text, str) for text in until):
            raise InputError(f"until: expected a string or a list of strings, found {until!r}")
        if seed is not None and not is_integer(seed):
            raise InputError(f"seed: expected an integer, found {seed!r}")
        if fields.get("num_return_sequences", 1) != 1:
            raise InputError(
                "num_return_sequences: a request has one answer; set the task's repeats"
            )
        if not fields["do_sample"]:
            fields = {
                name: value
                for name, value in fields.items()
                if not (name in FIELDS and FIELDS[name].only_sampling)
            }
        return cls(tuple(filter(None, until)), fields.pop("max_gen_toks"), seed, fields)


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """The prompt of a `generate_until` request as token ids, and its settings."""

    input_ids: Sequence[int]
    settings: GenerationSettings

    def row(self, stop_strings: Sequence[str], new_ids: Sequence[int]) -> dict[str, Any]:
        """The row of the batch engine that goes on after `new_ids`."""
        settings = self.settings
        row = {**settings.fields, "input_ids": [*self.input_ids, *new_ids]}
        if "max_length" not in row:
            row["max_new_tokens"] = settings.max_new_tokens - len(new_ids)
        if stop_strings:
            row["stop_strings"] = list(stop_strings)
        return row


def generate_until(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    *,
    slots: int | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, list[int]]]:
    """Yields the index and new token ids of each request, in the order in which they end.

    A request ends after the token that completes one of its stop strings, with an end token, or
    at its length. Request i samples as `jaxllm.generate(..., key=seed, row_ids=[i])`, so that
    repeats of a request differ.

    Args:
        slots: requests that are decoded at once; None: the default of `BatchGenerator`.
        seed: seed of requests that have none.
    """
    seeds = [seed if each.settings.seed is None else each.settings.seed for each in requests]
    for row_seed in dict.fromkeys(seeds):
        generator = BatchGenerator(model, tokenizer, slots=slots, seed=row_seed)
        unfinished = {i: list[int]() for i in range(len(requests)) if seeds[i] == row_seed}
        first_row = 0
        while unfinished:
            unfinished = yield from _run(generator, tokenizer, requests, unfinished, first_row)
            first_row += len(requests)  # so that no row draws the random numbers of another


def _run(
    generator: BatchGenerator,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    new_ids: Mapping[int, list[int]],
    first_row: int,
) -> Iterator[tuple[int, list[int]]]:
    """Goes on with some requests after their new ids.

    Yields the requests that ended too early. The engine, like transformers, also ends a row at a
    stop string that begins in the prompt, and the harness only at one that was generated.
    """
    stop_strings = {
        until: possible_strings(tokenizer, until)
        for until in {requests[i].settings.until for i in new_ids}
    }
    rows = [
        RawRow(first_row + i, i, requests[i].row(stop_strings[requests[i].settings.until], ids))
        for i, ids in new_ids.items()
    ]
    too_short: dict[int, list[int]] = {}
    for output in generator.answer(rows):
        i = output.index - first_row
        if output.error is not None:
            raise InputError(f"generate_until request {i}: {output.error}")
        ids = [*new_ids[i], *output.output_ids[0]]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        settings = requests[i].settings
        if (
            output.finish_reasons[0] == "stop"
            and not generator.model.is_encoder_decoder
            and len(ids) < settings.max_new_tokens
            and not any(stop in text for stop in settings.until)
        ):
            too_short[i] = ids
        else:
            yield i, ids
    return too_short


def possible_strings(tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[str, ...]:
    """The strings, or none if no token can complete any of them.

    T5's vocabulary has no line break, with which most tasks stop; the engine refuses such strings.
    """
    if not strings:
        return ()
    try:
        StopStringCriteria(tokenizer, strings)
    except InputError:
        return ()
    return strings


import_module("lm_eval.models")  # which adds the harness's own only to an empty registry
register_model("jaxllm")(JaxLM)
