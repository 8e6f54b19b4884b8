"""Many prompts of many lengths beside peers, in one run: SmolLM2 answers 64 questions greedily.

    python benchmarks/batch.py [--hf PYTHON] [--ct2 PYTHON --ct2-model FOLDER]
                               [--llamacpp PYTHON --gguf FILE] [--rounds N]

Answers end where the model ends them, or after 128 tokens; 16 rows side by side. Tokens/s is that
of all new tokens over the seconds of the whole call, reading the prompts included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from models import make_model
from protocol import Peer, Rows
from rich.console import Console
from rich.table import Table
from runner import WORKERS

from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.tokenizers import load_tokenizer

SUBJECTS = [
    "water", "the moon", "Paris", "a triangle", "bread", "the number 7", "a violin", "snow",
    "an atom", "chess", "a whale", "the Nile", "gold", "a volcano", "tea", "the letter A",
]  # fmt: skip
QUESTIONS = [
    "What is {}? Answer in one word.",
    "Explain {} to a child in two sentences.",
    "Write a short story about {}, with a beginning, a middle and an end. Mention a friend, a "
    "journey, a mistake, and what was learnt from it; and say in the end where everybody went.",
    "Is {} older than a hundred years? Say yes or no.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", metavar="PYTHON", help="environment with transformers and torch")
    parser.add_argument("--ct2", metavar="PYTHON", help="environment with ctranslate2")
    parser.add_argument("--ct2-model", metavar="FOLDER", help="the converted model")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="environment with llama-cpp-python")
    parser.add_argument("--gguf", metavar="FILE", help="the model in float32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model("smollm2", Path(scratch) / "smollm2")
        work = rows_of(folder)
        peers = [
            peer("jaxllm, refilled slots", sys.executable, "jaxllm_rows_worker.py", folder),
            peer("jaxllm, static", sys.executable, "jaxllm_rows_worker.py", folder, STATIC="1"),
        ]
        if args.hf:
            peers.append(peer("HF torch, static", args.hf, "hf_rows_worker.py", folder))
        if args.ct2:
            peers.append(peer("CTranslate2", args.ct2, "ct2_rows_worker.py", args.ct2_model))
        if args.llamacpp:
            peers.append(peer("llama.cpp", args.llamacpp, "llamacpp_rows_worker.py", args.gguf))
        first = [each.measure(work)["seconds"] for each in peers]
        measured = [[each.measure(work) for each in peers] for _ in range(args.rounds)]
        for each in peers:
            each.close()
    table = Table("peer", "new tokens/s", "seconds", "new tokens", "first call s", "CPU/wall")
    for i, each in enumerate(peers):
        seconds = statistics.median(r[i]["seconds"] for r in measured)
        busy = statistics.median(r[i]["cpu_per_wall"] for r in measured)
        made = measured[0][i]["tokens"]
        cells = (f"{made / seconds:.1f}", f"{seconds:.1f}", str(made), f"{first[i]:.1f}")
        table.add_row(each.name, *cells, f"{busy:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(", ".join(f"{each.name} ({each.info['version']})" for each in peers))


def rows_of(folder: Path) -> Rows:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    asked = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    chats = [[{"role": "user", "content": text}] for text in asked]
    rows = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    model_ends = GenerationConfig.from_file(folder / "generation_config.json").eos_token_id
    eos = model_ends[0] if isinstance(model_ends, list | tuple) else model_ends
    return Rows([list(map(int, row)) for row in rows], eos)


def peer(name: str, python: str, worker: str, model: str | Path, **environment: str) -> Peer:
    return Peer(name, python, str(WORKERS / worker), str(model), **environment)


if __name__ == "__main__":
    main()
