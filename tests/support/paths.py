"""Paths of a checkout."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
"""Modules that tests share; on the path of all tests."""
TESTS = SUPPORT.parent
ROOT = TESTS.parent
DATA = TESTS / "data"
DOCS = ROOT / "docs"
