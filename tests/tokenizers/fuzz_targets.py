"""Targets of the fuzz tests: load a tokenizer file and use it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from paths import DATA

from jaxllm.tokenizers import FastTokenizer, Tokenizer, load_tokenizer
from jaxllm.tokenizers.chat.sandbox import render_in_sandbox
from jaxllm.tokenizers.settings import TokenizerSettings

TEXT = "Hello <s>world</s>, 12 345 見<|im_end|>  é\n\t😀 don't " + "a" * 500
CHAT = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "ho"}]


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, "pair")
    tokenizer.encode_user(TEXT)
    tokenizer.decode(ids)
    tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)
    tokenizer(["a", TEXT], bucket=64)


def load_as(name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(path)
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        use(tokenizer)


def tokenizer_json(path: Path) -> None:
    load_as("tokenizer.json", path)


def tokenizer_and_prompt(path: Path) -> None:
    """A tokenizer.json with another field, the prompt."""
    pair = json.loads(path.read_bytes())
    prompt = pair.pop("prompt")
    tokenizer = FastTokenizer(pair, TokenizerSettings())
    ids = tokenizer.encode(prompt)
    tokenizer.encode_user(prompt)
    tokenizer.decode(ids[:10_000])
    tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], chat_template="<s>{{ messages[0].content }}</s>"
    )


def llama_model(path: Path) -> None:
    load_as("tokenizer.model", path)


def t5_model(path: Path) -> None:
    load_as("spiece.model", path)


def tokenizer_config(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = DATA / "tokenizers"
        (Path(folder) / "tokenizer_config.json").symlink_to(path)
        (Path(folder) / "tokenizer.model").symlink_to(data / "llama.model")
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        use(tokenizer)


def chat_template(path: Path) -> None:
    template = path.read_bytes().decode("utf-8", "replace")
    variables = {"messages": CHAT, "bos_token": "<s>", "eos_token": "</s>"}
    render_in_sandbox(template, {**variables, "add_generation_prompt": True}, now=0.0)
