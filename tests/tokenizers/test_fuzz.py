"""Mutated files in a child process: success or a JaxLLMError, no panic, hang or signal."""

import json
import random
from pathlib import Path

import pytest
from fuzz_seeds import seeds
from fuzzing import Outcome, fuzz_count, mutate, mutate_json, run_batch

TARGETS = (
    *("tokenizer_json", "tokenizer_and_prompt", "tokenizer_config", "llama_model", "t5_model"),
    "chat_template",
)


def replace(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


HOSTILE_PARTS = (
    ("normalizer", {"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 8}),
    ("normalizer", {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30}),
    ("normalizer", {"type": "Sequence", "normalizers": [replace("a", "aa")] * 10}),
    ("normalizer", replace("a", "b" * 10**6)),
    ("normalizer", replace(" ", "▁" * 300)),
    ("normalizer", {"type": "NFKD"}),
    ("normalizer", {"type": "Prepend", "prepend": "▁" * 4}),
    ("decoder", {"type": "Sequence", "decoders": [replace("a", "a" * 10)] * 9}),
    ("decoder", replace("a", "a" * 8)),
    ("pre_tokenizer", split("a+[bc]d")),
    ("pre_tokenizer", split(r"\s*[\r\n]+x|a*a*a*b")),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split("[a-z]+[0-9]")]}),
    ("added_tokens", [{"id": n, "content": f"<{n}>", "special": True} for n in range(500, 2000)]),
    ("added_tokens", [{"id": 500, "content": "a" * 10**6}]),
)
PROMPTS = (
    "a",
    " ",
    "\n",
    "<",
    "</s>",
    "é",
    "見",
    "\ufdfa",
    "<extra_id_0> ",
    "<|im_end|>",
    "x1 ",
    "\0",
)


def mutate_pair(data: bytes, rng: random.Random) -> bytes:
    """A tokenizer.json with a hostile part or other changes, and a short or very long prompt."""
    tree = json.loads(data)
    if rng.random() < 0.7:
        section, value = rng.choice(HOSTILE_PARTS)
        tree[section] = value
    if rng.random() < 0.5:
        tree = json.loads(mutate_json(json.dumps(tree).encode(), rng))
    if not isinstance(tree, dict):
        tree = {"model": tree}
    length = rng.choice((0, 1, 20, 1000, 50_000, 100_000))
    parts = rng.choices(PROMPTS, k=rng.randint(1, 3))
    tree["prompt"] = ("".join(parts) * length)[:length] + rng.choice(("", "b 1cd", "\ud800"))
    return json.dumps(tree).encode()


def run(kind: str, count: int, folder: Path, seed: int) -> list[Outcome]:
    rng = random.Random(seed)
    files, originals = [], seeds(kind, folder)
    for number in range(count):
        data = rng.choice(originals)
        is_json = data.startswith(b"{") and kind != "chat_template"
        change = mutate_json if is_json and rng.random() < 0.7 else mutate
        change = mutate_pair if kind == "tokenizer_and_prompt" else change
        files.append(folder / f"{number}")
        files[-1].write_bytes(change(data, rng))
    return run_batch(f"fuzz_targets:{kind}", files)


def check(outcomes: list[Outcome], kind: str) -> None:
    # An author may waste the time of those who use the file; see the threat model.
    may_hang = kind in ("tokenizer_and_prompt", "chat_template")
    hangs = [o for o in outcomes if may_hang and o.status == "hang"]
    bad = [o for o in outcomes if o not in hangs and (not o.harmless or o.grown_mib > 512)]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert max(len(outcome.detail) for outcome in outcomes) < 500


@pytest.mark.ci
@pytest.mark.parametrize("kind", TARGETS)
def test_mutated_files(kind, tmp_path):
    count = 100 if kind == "tokenizer_and_prompt" else 300  # its prompts are long
    outcomes = run(kind, fuzz_count(count), tmp_path, seed=0)
    check(outcomes, kind)
    assert {"ok", "refused"} <= {outcome.status for outcome in outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_many_mutated_files(kind, tmp_path):
    check(run(kind, fuzz_count(2000), tmp_path, seed=1), kind)


@pytest.mark.slow
def test_harness_detects_failures(tmp_path):
    """Every kind of harm is told apart, and the files after it are still run."""
    names = ("fine", "refused", "escaped", "hang", "died", "memory", "fine")
    files = [tmp_path / f"{number}-{name}" for number, name in enumerate(names)]
    for path in files:
        path.touch()
    outcomes = run_batch("test_fuzz:misbehave", files, seconds=2, gib=2)
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == ["ok", "refused", "escaped", "hang", "died", "escaped", "ok"]
    assert "MemoryError" in outcomes[5].detail


def misbehave(path: Path) -> None:
    import os
    import signal

    from jaxllm.common.errors import ConfigError

    match path.name.partition("-")[2]:
        case "refused":
            raise ConfigError("no")
        case "escaped":
            raise BaseException("panic")
        case "hang":
            while True:
                pass
        case "died":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            bytearray(4 * 2**30)
