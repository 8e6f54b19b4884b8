"""`jaxllm chat`: turns on one KV cache, commands, and Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from paths import DATA

import jaxllm
from jaxllm.cli import chat as chat_command
from jaxllm.cli.chat import Conversation, continued_ids, main
from jaxllm.errors import InputError
from jaxllm.tokenizers.byte_level import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = tiny.make("llama", vocab_size=len(tokenizer), max_position_embeddings=512, **special)
    jaxllm.save_hf(path, model, tokenizer)
    jaxllm.auto.AutoTokenizer.from_pretrained(path, chat_template=TEMPLATE).save(path)
    return path


def start(folder: Path, **options) -> Conversation:
    model, tokenizer = jaxllm.load(folder)
    fields = jaxllm.GenerationConfig(max_new_tokens=6)
    return Conversation(model, tokenizer, fields=fields, seed=0, **options)


@pytest.mark.ci
def test_turns_continue_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn computes its new tokens only, and answers as a call without a cache does."""
    cached: list[int] = []

    def generate(model, prompts, **options):
        past = options["past_key_values"]
        cached.append(0 if past is None else len(past.tokens()[0]))
        return jaxllm.generate(model, prompts, **options)

    monkeypatch.setattr(chat_command, "generate", generate)
    chat = start(folder, system="Be brief.")
    shown: list[str] = []
    for number, text in enumerate(["Hello", "And then?", "Why?"]):
        before = len(chat.ids)
        count = chat.ask(text, shown.append, lambda: False)
        prompt = chat.ids[: len(chat.ids) - count]
        full = jaxllm.generate(chat._model, [prompt], max_new_tokens=6).sequences[0]
        assert chat.ids == full.tolist()
        assert cached[number] == max(0, before - 1)  # the newest token is not in the cache
    contents = [message["content"] for message in chat.messages]
    assert contents[:2] == ["Be brief.", "Hello"]
    assert "".join(shown) == "".join(contents[2::2])
    assert len(chat.messages) == 7
    chat.reset(None)
    assert (chat.messages, chat.ids, chat.past) == ([], [], None)


@pytest.mark.ci
def test_a_stopped_answer_is_kept(folder: Path) -> None:
    chat = start(folder)
    seen: list[str] = []
    chat.ask("Hello", lambda text: None, lambda: False)
    past = chat.past
    count = chat.ask("Go on", seen.append, lambda: len(seen) >= 2)
    assert 0 < count < 6
    assert chat.past is past  # the last whole answer's
    assert chat.messages[-1]["content"] == "".join(seen)
    count = chat.ask("Again", seen.append, lambda: False)
    prompt = chat.ids[: len(chat.ids) - count]
    full = jaxllm.generate(chat._model, [prompt], max_new_tokens=6).sequences[0]
    assert chat.ids == full.tolist()


@pytest.mark.ci
def test_an_error_changes_nothing(folder: Path) -> None:
    chat = start(folder)
    chat.ask("Hello", lambda text: None, lambda: False)
    before = (list(chat.messages), list(chat.ids))
    chat.fields = chat.fields.merge(jaxllm.GenerationConfig(do_sample=True, num_return_sequences=2))
    with pytest.raises(InputError):
        chat.ask("Two answers", lambda text: None, lambda: False)
    with pytest.raises(
        InputError, match=r"the conversation has .* tokens, but the model's context has 512"
    ):
        chat.ask("x" * 600, lambda text: None, lambda: False)
    assert (chat.messages, chat.ids) == before


def test_the_models_own_tokens_are_kept(tmp_path: Path) -> None:
    """Encoding an answer's text again may give other tokens."""
    vocabulary = (DATA / "tokenizers" / "fast" / "gpt2.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(vocabulary)
    options = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    tokenizer = jaxllm.auto.AutoTokenizer.from_pretrained(tmp_path, **options)
    end = tokenizer.eos_token_id
    user, assistant = ({"role": role, "content": "Hello"} for role in ("user", "assistant"))
    prompt = tokenizer.apply_chat_template([user])
    letters = tokenizer.convert_tokens_to_ids(list("Hello"))
    assert letters != tokenizer.encode("Hello")
    messages = [user, assistant, user]
    for answer in (letters, [*letters, end]):
        ids = continued_ids(tokenizer, messages, [*prompt, *answer], {end})
        assert ids[: len(prompt) + 6] == [*prompt, *letters, end]
        assert ids[len(prompt) + 6 :] == prompt
    full = tokenizer.apply_chat_template(messages)
    assert continued_ids(tokenizer, messages, [], {end}) == full
    other = [user, {**assistant, "content": "changed"}, user]  # not what the ids say
    assert continued_ids(tokenizer, other, [*prompt, *letters], set()) == (
        tokenizer.apply_chat_template(other)
    )


@pytest.mark.parametrize("answer", ["yes", ""])
def test_the_end_token_of_a_users_message_ends_no_answer(answer: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content + eos_token }}"
        "{% else %}A:{{ m.content }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    end = tokenizer.eos_token_id
    user = {"role": "user", "content": "yes"}
    messages = [user, {"role": "assistant", "content": answer}, user]
    ids = [*tokenizer.apply_chat_template([user]), *answer.encode(), end]
    full = tokenizer.apply_chat_template(messages)
    assert continued_ids(tokenizer, messages, ids, {end}) == full


@pytest.mark.ci
def test_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "Hello \\",
        "there",
        '"""',
        "two",
        "lines",
        '"""',
        "/set max-new-tokens 3",
        "/set temprature 3",
        "/set",
        "Hello",
        "/unset max_new_tokens",
        "/unset max_new_tokens",
        "/system Be kind.",
        "/nothing",
        "/exit",
        "never read",
    ]
    asked: list[tuple[str, int | None]] = []
    ask = Conversation.ask

    def record(self: Conversation, text: str, *arguments) -> int:
        asked.append((text, self.fields.to_dict().get("max_new_tokens")))
        return ask(self, text, *arguments)

    monkeypatch.setattr(Conversation, "ask", record)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main([str(folder), "--max-new-tokens", "6", "--no-compile-cache"]) == 0
    assert asked == [("Hello \nthere", 6), ("two\nlines", 6), ("Hello", 3)]
    errors = capsys.readouterr().err
    assert "3 tokens in" in errors
    assert "did you mean `temperature`?" in errors
    assert "{'max_new_tokens': 3}" in errors
    assert "/unset: max_new_tokens is not set" in errors
    assert "unknown command /nothing" in errors


@pytest.mark.by_default("tiny-t5-a T5ForConditionalGeneration is not a chat model")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny-t5", "a T5ForConditionalGeneration is not a chat model"),
        ("tiny-gpt2", "no chat template"),
    ],
)
def test_models_that_cannot_chat(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(DATA / "reference" / model), "--no-compile-cache"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_with_ctrl_c_and_pasted_lines(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and not the session; no programs of earlier starts are used."""
    command = [sys.executable, "-m", "jaxllm", "chat", str(folder), "--max-new-tokens", "400"]
    command += ["--compile-cache", str(tmp_path)]
    master, terminal = pty.openpty()
    # Compiled as users do, which takes long enough to be reported.
    environment = os.environ | {"XLA_FLAGS": ""}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 4096)
        seen = seen[seen.index(text) + len(text) :]

    wait_for(b"> ")
    os.write(master, b"Hello\n")
    wait_for(b"compiled decode")
    process.send_signal(signal.SIGINT)
    wait_for(b"; stopped")
    wait_for(b"> ")
    os.write(master, b"half a line")
    wait_for(b"half a line")
    time.sleep(0.5)  # readline sees a signal when it waits for a key, not while it handles one
    process.send_signal(signal.SIGINT)
    wait_for(b"> ")
    pasted = b"/set max_new_tokens\n3"  # one message: a terminal puts these marks around it
    os.write(master, b"\x1b[200~" + pasted + b"\x1b[201~\n/set\n")
    wait_for(b"{'max_new_tokens': 3}")
    os.write(master, b"/exit\n")
    assert process.wait(timeout=60) == 0
    os.close(master)
