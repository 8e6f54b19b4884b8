#!/usr/bin/env bash
# grain 0.2.18: ConcatThenSplitIterDataset repeats the short feature of a row that it splits twice.
#
# The dataset packs rows of several features, such as the inputs and targets of an encoder-decoder.
# A row that does not fit is split where its longest feature has to be, and a shorter feature is
# often complete by then: none of it is left. At the next split of the row the length of what is
# left, 0, is taken for a place in the whole feature. So the packed row after that holds all of the
# feature once more, and training counts the targets of long rows twice. A row that is split once,
# and rows of one feature, are packed right.
#
# Seen on 2026-11-29 with grain 0.2.18 and numpy 2.4.6, Python 3.11:
#   6 inputs in packed rows of 3: targets [101, 102] | none
#   9 inputs in packed rows of 3: targets [101, 102] | none | [101, 102]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install grain==0.2.18 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import grain
import numpy as np


def packed(count):
    """Inputs and targets of each packed row that one row with so many inputs gives."""
    row = {"inputs": np.arange(1, count + 1), "targets": np.array([101, 102])}
    rows = grain.experimental.ConcatThenSplitIterDataset(
        grain.MapDataset.source([row]).to_iter_dataset(),
        length_struct={"inputs": 3, "targets": 4},
    )
    return [
        [x[name][x[f"{name}_segment_ids"] > 0].tolist() for name in ("inputs", "targets")]
        for x in rows
    ]


found = {}
for count in (6, 9):
    inputs, found[count] = zip(*packed(count))
    assert sum(inputs, []) == list(range(1, count + 1)), inputs
    shown = " | ".join(str(targets) if targets else "none" for targets in found[count])
    print(f"{count} inputs in packed rows of 3: targets {shown}")
assert found[6] == ([101, 102], []), found
assert found[9] == ([101, 102], [], [101, 102]), found
PYTHON
