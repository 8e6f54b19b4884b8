"""How long the first call of `generate` takes to compile: sampling beside greedy search.

python benchmarks/compile_time.py [--family llama] [--vocab 32000] [--rounds 5] [--layers 4]

A small model with random weights. The two calls take turns, each after all compiled programs are
dropped; JAX's persistent compile cache is off. Prints medians of the seconds that XLA compiles, of
those of the whole call, and of the CPU seconds of the whole call.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import jax
import numpy as np
from device_models import SMALL, random_model

import jaxllm
from jaxllm.common.compiling import CompileClock

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "key": 0},
}
COLUMNS = ("compiling", "call", "CPU")


def first_call(model: Any, fields: dict[str, Any]) -> tuple[float, ...]:
    """Seconds of a call that compiles all of its programs, by column."""
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (2, 12))
    jax.clear_caches()
    with contextlib.closing(CompileClock()) as clock:
        wall, cpu = time.perf_counter(), time.process_time()
        jaxllm.generate(model, ids, np.ones_like(ids), max_new_tokens=16, **fields)
        return clock.seconds, time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=SMALL, default="llama")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)

    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(args.family, "num_hidden_layers")
    config = {**SMALL[args.family], "vocab_size": args.vocab, layers: args.layers}
    config["decoder_start_token_id"] = 0
    model = random_model(config, jax.devices("cpu")[0], "float32")
    rounds = []
    for _ in range(1 + args.rounds):
        rounds.append([first_call(model, fields) for fields in CALLS.values()])
    greedy, sampling = (
        [statistics.median(column) for column in zip(*calls[1:], strict=True)]
        for calls in zip(*rounds, strict=True)
    )
    ratios = [s / g for s, g in zip(sampling, greedy, strict=True)]
    for name, values in (("greedy", greedy), ("sampling", sampling), ("ratio", ratios)):
        columns = (f"{column} {x:.2f}" for column, x in zip(COLUMNS, values, strict=True))
        print(f"{name:9}", *columns)


if __name__ == "__main__":
    main()
