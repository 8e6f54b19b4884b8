"""Sphinx settings of the documentation site; `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.inspect import stringify_signature

import jaxllm

project = "jaxllm"
author = "The jaxllm authors"
copyright = author  # noqa: A001
version = release = jaxllm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
nitpicky = True

html_theme = "furo"
html_title = f"jaxllm {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = False

myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs of doctests
copybutton_selector = "div:not(.output) > div.highlight pre"  # none for outputs of notebooks

default_role = "py:obj"  # `name` in a docstring is code, and a link where it is a public class
add_module_names = False
maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
# Attribute docstrings are sentences, not "type: description".
GoogleDocstring._parse_attribute_docstring = lambda self: list(self._lines)


class NotebookParser(MystParser):
    """Shows a notebook: its text, its code, and the outputs that are stored in it."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        cells: list[str] = []
        for cell in json.loads(inputstring)["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                cells.append(source)
                continue
            cells.append(f"```python\n{source}\n```")
            text = "".join(
                "".join(output["text"] if "text" in output else output["data"]["text/plain"])
                for output in cell["outputs"]
            )
            if text:
                cells.append(f"````{{code-block}} none\n:class: output\n\n{text.rstrip()}\n````")
        super().parse("\n\n".join(cells) + "\n", document)


def readable_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    return_annotation: str | None,
) -> tuple[str, str | None] | None:
    """Arguments of `__init__` for Flax modules, whose metaclass takes `*args, **kwargs`; none for
    protocols; types without jaxtyping's and jaxlib's module names."""
    if signature is None:
        return None
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
        arguments = list(inspect.signature(obj.__init__).parameters.values())[1:]
        signature = stringify_signature(inspect.Signature(arguments))
    if what == "class" and getattr(obj, "_is_protocol", False):
        signature = ""
    return re.sub(r"~?\b(jaxtyping|jaxlib\._jax)\.", "", signature), return_annotation


def code_of_arguments(app: Sphinx, doctree: nodes.document) -> None:
    """Lower-case names in docstrings are mostly arguments: no link to a function of that name."""
    for node in list(doctree.findall(pending_xref)):
        if node.get("reftype") == "obj" and re.fullmatch("[a-z_0-9]+", node["reftarget"]):
            node.replace_self(node.children)


def plain_type(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Node | None:
    """Text in place of a link: other libraries' types by their last name, code in docstrings."""
    if node["refdomain"] != "py":
        return None
    if node["reftype"] == "obj":
        return contnode
    if node["reftype"] in ("class", "data") and node.get("refexplicit") is not True:
        return nodes.Text(contnode.astext().rpartition(".")[2])
    return None


def setup(app: Sphinx) -> None:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("doctree-read", code_of_arguments)
    app.connect("missing-reference", plain_type)
