#!/usr/bin/env bash
# sentence-transformers 5.7.0 counts padding on the left in the weights of "weightedmean" pooling.
#
# This pooling (of SGPT) gives the token at position i the weight i. The library takes the column
# of the padded batch as the position. Columns of padding have no weight themselves, but on the
# left they move all tokens of a text to the right, where weights differ less. Models of the kind
# that uses this pooling are decoders, and tokenizers of decoders often pad on the left. The vector
# of a text then depends on the longest text of its batch; with padding on the right it does not.
#
# Seen on 2026-11-28 with sentence-transformers 5.7.0 and torch 2.13.0, Python 3.11:
#   five columns of padding on the right: the vector moves by 0.00 of its length
#   five columns of padding on the left: the vector moves by 0.30 of its length
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install sentence-transformers==5.7.0 transformers==5.24.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from sentence_transformers.sentence_transformer.modules.pooling import Pooling

pooling = Pooling(4, "weightedmean")
states = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


def vector(left, right):
    """The vector of three tokens' states with columns of padding on either side."""
    features = {
        "token_embeddings": torch.nn.functional.pad(states, (0, 0, left, right)),
        "attention_mask": torch.tensor([[0] * left + [1] * 3 + [0] * right]),
    }
    return pooling(features)["sentence_embedding"]


alone = vector(0, 0)
moved = {}
for side, columns in {"right": (0, 5), "left": (5, 0)}.items():
    moved[side] = ((vector(*columns) - alone).norm() / alone.norm()).item()
    print(
        f"five columns of padding on the {side}: "
        f"the vector moves by {moved[side]:.2f} of its length"
    )
assert moved["right"] < 1e-6, moved
assert moved["left"] > 0.1, moved
PYTHON
