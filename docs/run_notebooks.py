"""Executes the notebooks and stores what they print, which the site shows.

Run it after a change of a notebook: ``.venv/bin/python docs/run_notebooks.py``. Progress messages
are left out, since they hold times and paths of one machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).with_name("notebooks")


def shown_outputs(cell: Any) -> list[Any]:
    """What an executed cell printed, and its value, as text; without progress and numbers."""
    outputs = cell.get("outputs", [])
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    shown = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
    for output in outputs:
        if output.output_type == "execute_result":
            text = {"text/plain": output.data["text/plain"]}
            shown.append(nbformat.v4.new_output("execute_result", data=text))
    return shown


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=300).execute(cwd=str(FOLDER))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = shown_outputs(cell), None
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
