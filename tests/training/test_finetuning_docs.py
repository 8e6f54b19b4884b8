"""docs/finetuning.md: its table is that of the code, its Python runs, its links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from types import ModuleType

import pytest
from paths import DOCS

import jaxllm

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


@pytest.mark.usefixtures("smollm2_gguf")
@pytest.mark.parametrize(
    ("blocks", "learning_rate"),
    [
        pytest.param(2, "1e-2", marks=pytest.mark.ci),
        pytest.param(30, "1e-3", marks=pytest.mark.slow),
    ],
)
def test_the_notebook_runs(blocks: int, learning_rate: str, monkeypatch: pytest.MonkeyPatch):
    """The notebook as it stands, a minute of compilation, and on the model's first blocks."""
    block = "\n".join(re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    assert block.count("learning_rate=1e-3") == 1
    block = block.replace("learning_rate=1e-3", f"learning_rate={learning_rate}")
    load = jaxllm.load

    def load_blocks(path):
        model, tokenizer = load(path)
        assert len(model.backbone.stack.blocks) == 30
        model.backbone.stack.blocks = model.backbone.stack.blocks[:blocks]
        return model, tokenizer

    monkeypatch.setattr(jaxllm, "load", load_blocks)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(DOC), "exec"), {"__name__": "notebook"})
    losses = [float(line) for line in printed.getvalue().splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str):
    assert link.startswith("https://") or (DOCS / link).exists()
