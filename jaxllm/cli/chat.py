"""``jaxllm chat MODEL``: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from importlib import import_module

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxllm import GenerationConfig, generate
from jaxllm.cli.options import (
    add_field_flags,
    add_model,
    add_model_flags,
    check_seed,
    generation_fields,
    load_named,
    parse_value,
)
from jaxllm.cli.process import Parser, command, one_line, signals
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.common.progress import Reporter, set_progress
from jaxllm.generation import GenerateOutput
from jaxllm.generation.call.past_key_values import PastKeyValues
from jaxllm.generation.settings.resolve import check_for_use, merged_config, with_default_length
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers import Tokenizer

HELP = """\
/reset            begin anew; the system message stays
/system TEXT      begin anew with another system message; without TEXT none
/set FIELD VALUE  change a generation field, such as: /set temperature 0.7
/set              show the fields that are set
/unset FIELD      set a field back
/help             this list
/exit, Ctrl-D     leave
A line that ends with \\ goes on in the next one; a message of many lines stands between two
lines of three quotation marks. Lines that are pasted together are one message.
Ctrl-C stops an answer, or clears the line."""
Message = dict[str, str]


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        "[MODEL]",
        description="Talk with a model in the terminal. Its KV cache is kept between messages.",
        epilog=f"in the chat:\n{HELP}",
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--seed", type=int, help="the seed of --do-sample (default: random)")
    parser.add_argument(
        "--quiet", action="store_true", help="print only answers, and errors to stderr"
    )
    add_model_flags(parser)
    add_field_flags(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    check_seed(arguments.seed)
    fields = GenerationConfig(**generation_fields(arguments))
    check_for_use(fields)  # before loading, which takes minutes
    reporter = Reporter(quiet=arguments.quiet)
    path = arguments.model
    model, tokenizer = load_named(arguments, None, reporter)
    model = checked_generative(model, path)
    if model.is_encoder_decoder:
        raise UnsupportedError(f"{path}: a {type(model).__name__} is not a chat model")
    if tokenizer is None or tokenizer.chat_template is None:
        raise InputError(f"{path} has no chat template: use jaxllm generate")
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    system = arguments.system
    chat = Conversation(model, tokenizer, system=system, fields=fields, seed=seed)
    set_progress(not arguments.quiet)
    try:
        Session(chat, system, reporter).run()
    finally:
        set_progress(False)
    return 0


class Session:
    """Reads messages and commands, and prints answers."""

    def __init__(self, chat: Conversation, system: str | None, reporter: Reporter) -> None:
        self._chat, self._system, self._reporter = chat, system, reporter
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Runs until the input ends, or /exit."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):  # for editing lines and earlier ones
                readline = import_module("readline")
                # Pasted lines are one message; Python turns this off.
                readline.parse_and_bind("set enable-bracketed-paste on")
            self._reporter.say("/help lists the commands; Ctrl-D leaves")
        while True:
            text = self._read()
            if text is None or text.split()[:1] in (["/exit"], ["/quit"]):
                return
            if not text.strip():
                continue
            try:
                self._command(text) if text.startswith("/") else self._answer(text)
            except JaxLLMError as error:
                self._reporter.console.print(one_line(str(error)), markup=False, style="red")

    def _read(self) -> str | None:
        """Reads a message of one or several lines; None at the end of the input."""
        lines: list[str] = []
        fenced = False
        while True:
            try:
                with interruptible():
                    line = input(("... " if lines or fenced else "> ") if self._is_terminal else "")
            except EOFError:
                if self._is_terminal:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                print()
                return ""
            if line.strip() == '"""':
                if fenced:
                    return "\n".join(lines)
                fenced = True
            elif line.endswith("\\") and not fenced:
                lines.append(line[:-1])
            else:
                lines.append(line)
                if not fenced:
                    return "\n".join(lines)

    def _answer(self, text: str) -> None:
        start = time.perf_counter()
        with contextlib.closing(CompileClock()) as clock, stop_on_interrupt() as stopped:
            count = self._chat.ask(text, _write, stopped.is_set)
        _write("\n")
        seconds = time.perf_counter() - start - clock.seconds
        compiling = f", after {clock.seconds:.1f} s of compiling" if clock.seconds >= 0.1 else ""
        end = "; stopped" if stopped.is_set() else ""
        self._reporter.say(
            f"{count} tokens in {seconds:.1f} s{compiling}; conversation: "
            f"{len(self._chat.ids)} tokens{end}"
        )

    def _command(self, text: str) -> None:
        name, *rest = text.split(maxsplit=1)
        argument = rest[0].strip() if rest else ""
        chat = self._chat
        match name:
            case "/help":
                self._reporter.say(HELP)
            case "/reset":
                chat.reset(self._system)
            case "/system":
                self._system = argument or None
                chat.reset(self._system)
            case "/set" if not argument:
                self._reporter.say(str(chat.fields.to_dict()))
            case "/set":
                field, *value = argument.replace("=", " ", 1).split(maxsplit=1)
                if not value:
                    raise InputError(f"/set {field}: give a value, such as: /set temperature 0.7")
                field = field.lstrip("-").replace("-", "_")  # as an option of the command line
                changed = GenerationConfig(**{field: parse_value(value[0])})
                chat.fields = check_for_use(chat.fields.merge(changed))
            case "/unset":
                if argument not in chat.fields.to_dict():
                    raise InputError(f"/unset: {argument or 'no field'} is not set")
                chat.fields = chat.fields.without({argument})
            case _:
                raise InputError(f"unknown command {name}; /help lists the commands")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """Makes SIGINT raise KeyboardInterrupt inside, as Python does by default."""

    def react(number: int) -> None:
        if number != signal.SIGINT:
            signals.end(number)

    with signals.passed_to(react):
        earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)


@contextlib.contextmanager
def stop_on_interrupt() -> Generator[threading.Event]:
    """Gives an event that SIGINT sets inside; other signals end the process."""
    stopped = threading.Event()

    def react(number: int) -> None:
        stopped.set() if number == signal.SIGINT else signals.end(number)

    with signals.passed_to(react):
        yield stopped


class AnswerStoppedError(Exception):
    """The user stopped an answer."""


class Conversation:
    """A conversation whose KV cache is kept: each turn computes the new tokens only.

    Args:
        model: a decoder-only model.
        tokenizer: the model's, with a chat template.
        system: text of the system message, if any.
        fields: generation fields, which may be changed between turns.
        seed: of the samples.

    Attributes:
        messages: the messages so far, the system's included.
        ids: token ids so far: of the last prompt and its answer, as the model wrote them.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        fields: GenerationConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.fields = fields or GenerationConfig()
        self._model, self._tokenizer = model, tokenizer
        self._key = jax.random.key(seed)
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Begins anew, with this system message."""
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.ids: list[int] = []
        self.past: PastKeyValues | None = None

    def ask(self, text: str, show: Callable[[str], None], stopped: Callable[[], bool]) -> int:
        """Answers a message; returns the number of tokens of the answer.

        If it raises, the conversation is as before.

        Args:
            text: the message.
            show: called with each piece of the answer's text.
            stopped: the answer ends, and is kept, when this returns True.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        _, ends = merged_config(self._model, self.fields, {})
        prompt = continued_ids(self._tokenizer, messages, self.ids, ends)
        limit = self._model.config.context_length
        if limit is not None and len(prompt) >= limit:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, but the model's context has "
                f"{limit}; send less, or begin anew with /reset"
            )
        config = with_default_length(self.fields, self._model, len(prompt))
        streamer = _Streamer(self._tokenizer, show, stopped)
        past = self.past
        if past is not None:
            [cached] = past.tokens()
            is_prefix = len(cached) < len(prompt) and prompt[: len(cached)] == cached.tolist()
            past = past if is_prefix else None
        try:
            output: GenerateOutput = generate(
                self._model,
                [prompt],
                generation_config=config,
                key=jax.random.fold_in(self._key, len(messages)),
                past_key_values=past,
                return_past_key_values=True,
                streamer=streamer,
                tokenizer=self._tokenizer,
            )
            self.past = output.past_key_values
        except AnswerStoppedError:
            pass  # the cache of the last answer still holds what came before
        streamer.end()
        answer = streamer.ids
        content = self._tokenizer.decode(answer, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": content}]
        self.ids = [*prompt, *answer]
        return len(answer)


class _Streamer:
    """Shows tokens as they come; raises AnswerStoppedError after the token at which the user stops.

    The first token is shown with the second: it comes from the prefill, and the decode loop may
    compile for many seconds in between.
    """

    def __init__(
        self, tokenizer: Tokenizer, show: Callable[[str], None], stopped: Callable[[], bool]
    ) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._show, self._stopped = show, stopped
        self._has_prompt = self._has_ended = False
        self._shown = 0
        self.ids: list[int] = []

    def put(self, value: Int[np.ndarray | Array, ...]) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if len(value) != 1:
            raise InputError("num_return_sequences: a chat has one answer")
        self.ids.append(int(value[0]))
        if len(self.ids) > 1:
            self._show_rest()
        if self._stopped():
            raise AnswerStoppedError

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._show_rest()
            self._show(self._decoder.end())

    def _show_rest(self) -> None:
        self._show(self._decoder.put(self.ids[self._shown :]))
        self._shown = len(self.ids)


def continued_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], ids: list[int], ends: Collection[int]
) -> list[int]:
    """Token ids of a conversation, up to where the next answer begins.

    They begin with `ids`, the tokens so far, where the template writes the earlier messages as it
    did before: encoding an answer's text may give other tokens than those the model wrote, and the
    KV cache holds the latter. Only what the template writes after the answer is added.

    Args:
        messages: all messages; the last one is the user's.
        ids: the last prompt and its answer; empty at the first message.
        ends: end tokens; the template writes one of them after an answer.
    """
    whole: list[int] = tokenizer.apply_chat_template(messages)
    if not ids:
        return whole
    earlier: list[int] = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=False)
    # An end token before the answer ends the user's message.
    start = len(tokenizer.apply_chat_template(messages[:-2]))
    places = [place for place in range(start, len(earlier)) if earlier[place] in ends]
    if whole[: len(earlier)] != earlier or not places:
        return whole
    answer = messages[-2]["content"].strip()
    if not tokenizer.decode(earlier[: places[-1]]).strip().endswith(answer):
        return whole
    closing = earlier[places[-1] :]
    if ids[-1] in ends:  # the model closed its answer itself
        closing = closing[1:]
    return [*ids, *closing, *whole[len(earlier) :]]


main = command(_parser, _run, "jaxllm chat")
