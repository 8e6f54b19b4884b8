"""The documentation site's pages. `make docs` checks links and toctrees, and builds the site."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import jax
import pytest
from flax import nnx
from pages import run_python, run_shell, shell_blocks
from paths import ROOT
from test_public_names import PACKAGES
from tiny import CONFIGS

import jaxllm
from jaxllm.models import qwen2, registry

DOCS = ROOT / "docs"


def test_every_public_name_is_documented() -> None:
    page = (DOCS / "api" / "jaxllm.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))
    assert documented == set(jaxllm.__all__) - {"JaxLLMError"}  # on the page of jaxllm.errors


TOP = [name for name in PACKAGES if "." not in name or name.startswith("training.")]


@pytest.mark.parametrize("package", TOP)
def test_every_public_package_has_a_page(package: str) -> None:
    page = (DOCS / "api" / f"{package}.md").read_text(encoding="utf-8")
    assert f".. automodule:: jaxllm.{package}\n   :members:" in page
    assert f"\n{package}\n" in (DOCS / "api" / "index.md").read_text(encoding="utf-8")


def linked_files(text: str) -> list[str]:
    """Relative targets of links outside code, without their anchors."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", prose)


def test_links_lead_somewhere() -> None:
    """As GitHub resolves them, beside the file; README.md has a test of its own."""
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    links = {page: linked_files(page.read_text(encoding="utf-8")) for page in pages}
    assert links[DOCS / "index.md"]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page, targets in links.items()
        for link in targets
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    notebooks = {f"notebooks/{path.stem}" for path in (DOCS / "notebooks").glob("*.ipynb")}
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    assert listed == pages | notebooks | {"api/index", "decisions/index"}


def test_every_decision_is_listed_and_pointers_to_docs_exist() -> None:
    """The list has a sentence on each record, and comments name pages that are there."""
    folder = DOCS / "decisions"
    records = {path.name for path in folder.glob("*.md")} - {"index.md"}
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^- \[.+\]\((.+?)\)", index, re.MULTILINE)) == sorted(records)
    sources = [*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    comments = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(r"(?<![\w/])docs/[\w/-]+\.md", comments))
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_adding_a_family_shows_qwen2_as_it_is() -> None:
    """Its config's fields, its wiring, and its entry in the registry."""
    text = (DOCS / "adding-a-family.md").read_text(encoding="utf-8")
    config, wiring, entry = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^    (\w+): .* = (\S+)", config, re.MULTILINE)
    inherited = {field.name: field.default for field in fields(qwen2.RotaryConfig)}
    own = {f.name: f.default for f in fields(qwen2.Qwen2Config)}
    changed = {name: repr(own[name]) for name in own if own[name] != inherited.get(name, ...)}
    assert dict(shown) == changed
    own_names = {
        "Qwen2Backbone",
        "Qwen2ForCausalLM",
        "Qwen2ForSequenceClassification",
        "Qwen2Model",
    }
    names = {name: value for name, value in vars(qwen2).items() if name not in own_names}
    exec(wiring, names)
    assert own_names <= set(names)
    tiny_config = qwen2.Qwen2Config.from_dict(CONFIGS["qwen2"])
    ours, theirs = (
        jax.eval_shape(lambda made=made: nnx.state(made(tiny_config, rngs=nnx.Rngs(0))))
        for made in (names["Qwen2ForCausalLM"], qwen2.Qwen2ForCausalLM)
    )
    assert ours == theirs
    family = eval(f"{{{entry}}}", vars(registry))["qwen2"]
    used = registry.FAMILIES["qwen2"]
    for name in ("config", "classes", "structure", "aliases", "parts"):
        assert getattr(family, name) == getattr(used, name)


@pytest.mark.ci
def test_the_quickstart_runs(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, printed = run_python(DOCS / "quickstart.md")
    assert printed.splitlines() == ["The capital of France is Paris."] * 2
    (commands,) = shell_blocks(DOCS / "quickstart.md")
    assert run_shell(commands, tmp_path).startswith("The capital of France is Paris.")
