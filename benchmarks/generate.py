"""Strategies of generation beside peers, in one run.

    python benchmarks/generate.py smollm2 [--hf PYTHON] [--ct2 PYTHON --ct2-model FOLDER]
    python benchmarks/generate.py t5-small [--flax PYTHON] ...

SmolLM2: beam search with 4 beams at batch 4, sampling at batch 8. A random model of T5-small's
shape: greedy and 4 beams at batch 8. Prompt 128; see decode.py for how tokens/s is counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from models import make_model
from protocol import Workload
from runner import compare, parse, peers_of

WORKLOADS = {
    "smollm2": {
        "4 beams, batch 4": Workload(4, new=64, beams=4),
        "sampling, batch 8": Workload(8, sample=True),
    },
    "t5-small": {
        "greedy, batch 8": Workload(8),
        "4 beams, batch 8": Workload(8, beams=4),
    },
}


def main() -> None:
    args = parse(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(args.model, Path(scratch) / args.model)
        compare(peers_of(args, folder), WORKLOADS[args.model], args.rounds)


if __name__ == "__main__":
    main()
