"""The training pages: their code runs, on tiny models or on SmolLM2 as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import run_python, run_shell, shell_blocks
from paths import DOCS, ROOT
from tiny_runs import MODELS

import jaxllm
from jaxllm.auto import AutoModelForCausalLM
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.run import read_recipe
from jaxllm.training.run.recipe import recipes

FINETUNING, DATA = DOCS / "finetuning.md", DOCS / "finetuning-data.md"
LORA, RECIPES = DOCS / "lora.md", DOCS / "recipes.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EXAMPLE, PREFERENCES, RESUME = shell_blocks(FINETUNING)


def code_blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def save_tiny_model(folder: Path) -> None:
    """A Llama with random weights, whose tokens are bytes, with a chat template."""
    config = MODELS["llama"] | {"max_position_embeddings": 256, "attention_dropout": 0.0}
    jaxllm.save_hf(folder, AutoModelForCausalLM.from_config(config), byte_tokenizer())
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_example(folder: Path, model: str) -> None:
    """The rows and the recipe of docs/finetuning.md, for a model."""
    (folder / "train.jsonl").write_text(code_blocks(FINETUNING, "json")[0])
    recipe = code_blocks(FINETUNING, "yaml")[0]
    assert recipe.count("path: smollm2") == 1
    recipe = recipe.replace("path: smollm2", f"path: {model}")
    if model != "smollm2":
        recipe = recipe.replace("max_length: 64", "max_length: 128")  # bytes
    (folder / "recipe.yaml").write_text(recipe)


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_the_example_learns(tmp_path: Path) -> None:
    write_example(tmp_path, "smollm2")
    assert run_shell(EXAMPLE, tmp_path).splitlines()[-1] == "topic: delivery"
    assert "The answer is `topic: delivery`." in FINETUNING.read_text()


@pytest.mark.ci
def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    write_example(tmp_path, "tiny")
    block = EXAMPLE.replace("generate --adapter", "generate --model tiny --adapter")
    assert block != EXAMPLE
    run_shell(block, tmp_path)
    assert (tmp_path / "topics-lora" / "adapter_model.safetensors").exists()
    run_shell(RESUME, tmp_path)
    lines = (tmp_path / "runs" / "topics" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 20


def test_the_evaluation_is_a_part_of_a_recipe(tmp_path: Path) -> None:
    write_example(tmp_path, "smollm2")
    with (tmp_path / "recipe.yaml").open("a") as file:
        file.write(code_blocks(FINETUNING, "yaml")[1])
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.early_stopping is not None
    assert recipe.evaluation.metrics == ("exact_match",)


@pytest.mark.ci
def test_the_preferences_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "path" / "to" / "chat-model")
    row = {"prompt": "Say yes. ", "chosen": "yes", "rejected": "no"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    run_shell(f"{PREFERENCES.rstrip()} --max-steps 2", tmp_path)
    lines = (tmp_path / "runs" / "preferences" / "metrics.jsonl").read_text().splitlines()
    assert "rewards/margins" in json.loads(lines[-1])


@pytest.mark.ci
def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    write_example(tmp_path, "tiny")
    namespace, printed = run_python(FINETUNING)
    assert namespace["result"].step == 20
    assert printed.startswith("['")


def test_the_data_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "path" / "to" / "model")
    (tmp_path / "train.jsonl").write_text(code_blocks(FINETUNING, "json")[0])
    namespace, printed = run_python(DATA)
    assert namespace["batches"].counts.examples == 4
    assert "topic: account" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_the_recipe_of_the_page_runs(tmp_path: Path) -> None:
    (block,) = shell_blocks(RECIPES)
    assert "llama_classification" in run_shell(block, tmp_path)
    assert (tmp_path / "runs" / "docstrings" / "report.html").exists()


def test_the_page_has_all_recipes() -> None:
    text = RECIPES.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[(\w+)\]", text, re.MULTILINE)) == set(recipes())


def test_lora_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "path" / "to" / "model")
    namespace, _ = run_python(LORA)
    assert all(".lora_" in name for name in namespace["trained"])
    merged, _ = jaxllm.load(tmp_path / "merged")
    assert type(merged) is type(namespace["base"])


def test_the_t5_recipe_of_csv_files_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = code_blocks(RECIPES, "yaml")
    model = ROOT / "tests" / "data" / "reference" / "tiny-t5"
    assert "google-t5/t5-small" in block
    recipe = block.replace("google-t5/t5-small", str(model)).replace("every: 500", "every: 2")
    (tmp_path / "summaries.yaml").write_text(
        recipe.replace(": 512", ": 32").replace(": 128", ": 8")
    )
    rows = "article,summary\n" + "".join(f"the number {i},it is {i}\n" for i in range(8))
    for name in ("train.csv", "held_out.csv"):
        (tmp_path / name).write_text(rows)
    monkeypatch.chdir(tmp_path)
    result = jaxllm.train(
        "summaries.yaml", {"max_steps": 2, "optimizer.warmup_steps": 0}, quiet=True
    )
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    last = next(row for row in map(json.loads, reversed(lines)) if "eval_rougeL" in row)
    assert 0 <= last["eval_rougeL"] <= 1
    assert 0 <= last["eval_bleu"] <= 100
