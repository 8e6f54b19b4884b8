"""The notebooks: stored with what they print, and every cell runs as it stands."""

from __future__ import annotations

import runpy

import nbclient
import nbformat
import pytest
from paths import ROOT

FOLDER = ROOT / "docs" / "notebooks"
shown_outputs = runpy.run_path(str(ROOT / "docs" / "run_notebooks.py"))["shown_outputs"]
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.in_ci("batch")
@pytest.mark.parametrize("name", NAMES)
def test_stores_what_it_prints(name: str) -> None:
    """As docs/run_notebooks.py writes it: printed text alone, and nothing of the machine."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    prints = [cell for cell in code if "print(" in cell.source]
    assert all(cell.outputs for cell in prints)
    assert prints
    for cell in code:
        assert cell.outputs == shown_outputs(cell)
        assert cell.execution_count is None
        text = str(cell.outputs)
        assert len(text) < 5000
        assert "site-packages" not in text
        assert str(ROOT) not in text


WARNINGS_ARE_ERRORS = """
import warnings
warnings.filterwarnings("error", module="jaxllm|__main__")
"""

CHECKS = {
    "batch": """
assert [result.id for result in results[1:]] == ["sea", "chat", "short"]
assert len(results[3].output_ids[0]) == 4
assert broken[0].error is None and "temperature" in broken[1].error
assert len(from_file) == 3
""",
    "finetuning": """
assert losses[-1] < 0.2 * losses[0]
assert "butterscotch" in texts[0] and "243" in texts[1]
assert type(again) is type(trained)
""",
    "quickstart": """
answer = tokenizer.decode(output.sequences[0, len(ids) :], skip_special_tokens=True)
assert "Paris" in answer
assert samples.sequences.shape[0] == 2
assert max(sums, key=sums.get) == " Paris"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = pytestconfig.cache.mkdir("jax")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))
    notebook = read(name)
    first, last = map(nbformat.v4.new_code_cell, (WARNINGS_ARE_ERRORS, CHECKS[name]))
    notebook.cells = [first, *notebook.cells, last]
    nbclient.NotebookClient(notebook, timeout=300).execute(cwd=str(FOLDER))
    for cell, old in zip(notebook.cells[1:-1], read(name).cells, strict=True):
        assert bool(cell.get("outputs") and shown_outputs(cell)) == bool(old.get("outputs"))
    outputs = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if "Warning" in output] == []
