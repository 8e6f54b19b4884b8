"""Finds the helper modules of the tests when a comparison script runs by itself."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SAMPLES = TESTS / "data" / "differential"
"""Stored results of the references, which the default tests read."""

sys.path += [str(TESTS), str(TESTS / "support")]
