"""Cut smollm2_text.npz (8 MB, made by gen_parity.py) down to what tests need.

    python slim_smollm2.py /path/to/full/smollm2_text.npz

Kept: the prompts with their mask and positions, all token outputs with margins and beam scores,
`last_logits` [3, vocab] (each row's last position: the rows are left padded), and
`early_logits` [1, vocab]: row 2 at position 8, a real token. Dropped: the other logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

with np.load(sys.argv[1]) as full:
    kept = {name: full[name] for name in full.files if name != "logits"}
    kept["last_logits"] = full["logits"][:, -1]
    kept["early_logits"] = full["logits"][2:3, 8]
    assert full["attention_mask"][2, 8] == 1
np.savez_compressed(Path(__file__).parent / "smollm2_text.npz", **kept)
