"""``jaxllm chat MODEL``: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from importlib import import_module

from jaxllm import GenerationConfig
from jaxllm.cli import signals
from jaxllm.cli.conversation import Conversation, answer_fields
from jaxllm.cli.exits import Parser, one_line, run_command
from jaxllm.cli.field_flags import add_field_flags, generation_fields, parse_value
from jaxllm.cli.model_flags import (
    add_compile_cache_flags,
    add_model_flags,
    keep_programs,
    load_named,
    model_path,
)
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.common.progress import Reporter, set_progress
from jaxllm.generation.settings.consistency import check_for_use
from jaxllm.models.decoder import checked_generative

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


def main(argv: Sequence[str] | None = None, program: str = "jaxllm chat") -> int:
    """Entry point; returns the exit code."""
    return run_command(
        lambda arguments: _run(_parser(program).parse_args(arguments)), program, argv
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        usage=f"{program} [options] [MODEL]",
        description="Talk with a model in the terminal. Its KV cache is kept between messages.",
        epilog=f"in the chat:\n{HELP}",
    )
    parser.add_argument(
        "model", nargs="?", help="folder, .gguf or Hub id (default: the bundled SmolLM2)"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--seed", type=int, help="for --do-sample (default: random)")
    parser.add_argument("--quiet", action="store_true", help="only answers, and errors on stderr")
    add_model_flags(parser)
    add_compile_cache_flags(parser)
    add_field_flags(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    fields = GenerationConfig(**generation_fields(arguments))
    check_for_use(fields)  # before loading, which takes minutes
    reporter = Reporter(quiet=arguments.quiet)
    keep_programs(arguments, reporter)
    path = model_path(arguments)
    model, tokenizer = load_named(arguments, None, reporter)
    model = checked_generative(model, str(path))
    if model.is_encoder_decoder:
        raise UnsupportedError(f"{path}: a {type(model).__name__} cannot chat")
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
                fields = answer_fields(field, parse_value(value[0]), chat.fields)
                chat.fields = check_for_use(fields)
            case "/unset":
                if argument not in chat.fields.to_dict():
                    raise InputError(f"/unset: {argument or 'no field'} is not set")
                chat.fields = chat.fields.without({argument})
            case _:
                raise InputError(f"{name}: no such command; /help lists them")


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
