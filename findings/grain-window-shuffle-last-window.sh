#!/usr/bin/env bash
# grain 0.2.18: WindowShuffleMapDataset reads rows twice and leaves others out in its last window.
#
# It shuffles the indices of each window, and takes the last window for a full one, even if the rows
# end within it. Indices behind the last row are valid in grain: they mean the next epoch, so they
# give rows from the start once more, and as many rows of the last window are missing. Which ones
# depends on the seed. With a window larger than the data, one row can come many times. The length
# is right, and nothing is raised. Only where the window size divides the number of rows is each row
# there once. WindowShuffleIterDataset, the same for iterators, shuffles what is left.
#
# Seen on 2026-11-30 with grain 0.2.18, Python 3.11 (10 rows, seed 1):
#   map, window of 5: each row once
#   map, window of 4: twice [0, 1], never [8, 9]
#   map, window of 100: twice or more [0, 3], never [1, 6, 9]
#   iter, window of 4: each row once
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install grain==0.2.18
cd "$folder"
venv/bin/python - <<'PYTHON'
import grain

rows = list(range(10))


def count(dataset):
    """The rows that come more than once, and the rows that do not come."""
    seen = list(dataset)
    assert len(seen) == len(rows), seen
    return [x for x in rows if seen.count(x) > 1], [x for x in rows if x not in seen]


source = grain.MapDataset.source(rows)
for_map = grain.experimental.WindowShuffleMapDataset
for_iter = grain.experimental.WindowShuffleIterDataset
exact = count(for_map(source, window_size=5, seed=1))
rest = count(for_map(source, window_size=4, seed=1))
large = count(for_map(source, window_size=100, seed=1))
iterated = count(for_iter(source.to_iter_dataset(), window_size=4, seed=1))
print("map, window of 5:", "each row once" if exact == ([], []) else exact)
print(f"map, window of 4: twice {rest[0]}, never {rest[1]}")
print(f"map, window of 100: twice or more {large[0]}, never {large[1]}")
print("iter, window of 4:", "each row once" if iterated == ([], []) else iterated)
assert exact == iterated == ([], []), (exact, iterated)
assert rest == ([0, 1], [8, 9]) and large[1] == [1, 6, 9], (rest, large)
PYTHON
