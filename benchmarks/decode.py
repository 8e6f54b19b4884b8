"""Decoding speed beside peers and the machine's own memory bandwidth, in one run.

    python benchmarks/decode.py smollm2 [--hf PYTHON] [--ct2 PYTHON --ct2-model FOLDER]
    python benchmarks/decode.py t5-small ...

`smollm2` is the bundled model; `t5-small` a random one of T5-small's shape. PYTHON is the
interpreter of an environment that has the peer. Tokens/s is batch x new / seconds of the whole
call, prefill included; medians of `--rounds` rounds, peers taking turns within each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from models import make_model
from protocol import Workload
from runner import compare, parse, peers_of


def main() -> None:
    parser = parse(__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    workloads = {f"batch {batch}": Workload(int(batch)) for batch in args.batches.split(",")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(args.model, Path(scratch) / args.model)
        compare(peers_of(args, folder), workloads, args.rounds)


if __name__ == "__main__":
    main()
