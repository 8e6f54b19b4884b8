"""docs/generation.md says of every field what the code does."""

import importlib.util

from paths import DOCS


def test_the_table_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("maker", DOCS / "make_generation_table.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = maker.DOC.read_text()
    assert "`top_k`" in text
    assert maker.rewritten(text) == text, "run python docs/make_generation_table.py"
