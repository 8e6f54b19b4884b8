"""docs/finetuning.md: its tables are those of the code, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from paths import DOCS

DOC = DOCS / "finetuning.md"
TEXT = DOC.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maker", DOCS / "make_finetuning_table.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_the_tables_are_those_of_the_code(maker: ModuleType):
    assert "`schedule_steps`" in TEXT
    assert maker.rewritten(TEXT) == TEXT, "run python docs/make_finetuning_table.py"


def test_the_schema_is_that_of_the_code(maker: ModuleType):
    assert maker.SCHEMA.read_text() == maker.schema(), "run python docs/make_finetuning_table.py"
    for recipe in maker.SCHEMA.parent.glob("*.yaml"):
        first = recipe.read_text().splitlines()[0]
        assert first == f"# yaml-language-server: $schema={maker.SCHEMA.name}"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str):
    assert link.startswith("https://") or (DOCS / link).exists()
