"""One peer, one process: it loads its model once, then times workloads on demand.

All peers stay loaded and take turns, so that a noisy minute of the machine hits every one of them.
A request and an answer are a line of JSON each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """Generation of exactly `new` tokens (no end token) for `batch` prompts of `prompt` tokens:
    greedy, by `beams`, or sampling at temperature 0.8 with top-k 50 and top-p 0.95."""

    batch: int
    prompt: int = 128
    new: int = 128
    beams: int = 1
    sample: bool = False

    def ids(self, vocab_size: int) -> np.ndarray:
        high = min(vocab_size, 32000)
        return np.random.RandomState(0).randint(10, high, size=(self.batch, self.prompt))


@dataclasses.dataclass(frozen=True)
class Training:
    """One optimizer step (AdamW) on `batch` rows of `length` tokens, with or without dropout."""

    batch: int = 4
    length: int = 256
    dropout: bool = True

    def ids(self, vocab_size: int) -> np.ndarray:
        high = min(vocab_size, 32000)
        return np.random.RandomState(0).randint(10, high, size=(self.batch, self.length))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Greedy answers to prompts of many lengths, each until its end token or `new` tokens."""

    rows: list[list[int]]
    """Token ids."""
    eos: int
    new: int = 128
    size: int = 16
    """Rows that are decoded side by side."""

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Static batches, sorted by length: ids [B, T], padded on the left, and their mask."""
        rows = sorted(self.rows, key=len)
        for start in range(0, len(rows), self.size):
            batch = rows[start : start + self.size]
            width = max(map(len, batch))
            ids, mask = np.zeros((2, len(batch), width), np.int64)
            for row, ids_row, mask_row in zip(batch, ids, mask, strict=True):
                ids_row[width - len(row) :], mask_row[width - len(row) :] = row, 1
            yield ids, mask

    def made(self, new: np.ndarray) -> int:
        """Tokens up to the end token of each row, which counts, of a batch's new tokens [B, N]."""
        ended = new == self.eos
        return int(np.where(ended.any(1), ended.argmax(1) + 1, new.shape[1]).sum())


def serve(info: dict, run: Callable[[Any], object], kind: type[Any] = Workload) -> None:
    """A worker's main loop: times `run` once per request; a shape's first call is a warm-up.

    A number that `run` returns is how many tokens it made, and a dict is a part of the answer.
    """
    print(json.dumps(info), flush=True)
    for line in sys.stdin:
        workload = kind(**json.loads(line))
        cpu, start = time.process_time(), time.perf_counter()
        made = run(workload)
        seconds = time.perf_counter() - start
        busy = (time.process_time() - cpu) / seconds
        answer: dict[str, Any] = {"seconds": seconds, "cpu_per_wall": busy}
        if isinstance(made, int):
            answer["tokens"] = made
        elif isinstance(made, dict):
            answer |= made
        print(json.dumps(answer), flush=True)


class Peer:
    """The other end of `serve`."""

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        *arguments: str,
        alone: bool = False,
        **environment: str,
    ) -> None:
        self.name = name
        quiet = {"TOKENIZERS_PARALLELISM": "false"}
        if not alone:
            # Idle OpenMP threads that spin would take the core of whoever's turn it is.
            quiet["OMP_WAIT_POLICY"] = "passive"
        env = os.environ | quiet | environment
        self.process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.info = self._answer()

    def measure(self, workload: Any) -> dict:
        """The answer to a request: a `Workload`, or what else the worker's `kind` is."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dataclasses.asdict(workload)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the worker, which may have died already."""
        with contextlib.suppress(BrokenPipeError), self.process:
            pass

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self.name}: the worker died; see its error above")
        return json.loads(line)
