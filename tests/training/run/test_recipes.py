"""The recipes in configs/ run as they stand, on what configs/make_data.py writes."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

from jaxllm.cli.train import main
from jaxllm.common.errors import ConfigError
from jaxllm.training.monitor.report import BEFORE
from jaxllm.training.run.recipe import Evaluation, find_recipe, read_recipe

CONFIGS = ROOT / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
IN_CI = "gpt2_bytes"
ROWS = 24


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", CONFIGS / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def little_data(maker: ModuleType, tmp_path: Path) -> Path:
    """A copy of the recipes, beside the first rows of every set."""
    configs = tmp_path / "configs"
    folder = configs / "data"
    folder.mkdir(parents=True)
    for recipe in RECIPES:
        shutil.copy(recipe, configs)
    for name, make in maker.SETS.items():
        for part, rows in zip(("train", "eval"), make(), strict=True):
            few = [{k: v[:2000] if k == "text" else v for k, v in r.items()} for r in rows[:ROWS]]
            path = folder / f"{name}_{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in few))
    return configs


def test_there_are_six():
    assert len(RECIPES) == 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_is_read_and_names_data_that_is_made(path: Path, maker: ModuleType):
    recipe = read_recipe(path)
    assert recipe.eval_data is not None
    folder = CONFIGS / "data"
    data_sets = {
        str(folder / f"{name}_{part}.jsonl") for name in maker.SETS for part in ("train", "eval")
    }
    assert {recipe.data.path, recipe.eval_data.path} <= data_sets
    # A recipe ends where its schedule does.
    assert recipe.optimizer.schedule_steps == recipe.max_steps


@pytest.mark.ci
def test_data_are_the_same_every_time_and_nothing_held_out_is_trained_on(maker: ModuleType):
    for make in maker.SETS.values():
        train, held_out = make()
        assert (train, held_out) == make()
        asked = [{spelled(row) for row in rows} for rows in (train, held_out)]
        assert asked[0].isdisjoint(asked[1])
        assert [len(actual) for actual in asked] == [len(train), len(held_out)]


def spelled(row: dict) -> str:
    """The question of a row, without the answer."""
    single = [row.get("source", row.get("text"))]
    return json.dumps(row.get("messages", row.get("prompt", single))[0])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (90, "ninety"),
        (700, "seven hundred"),
        (4_021, "four thousand twenty-one"),
        (9_999, "nine thousand nine hundred ninety-nine"),
    ],
)
def test_numbers_in_words(maker: ModuleType, number: int, words: str):
    assert maker.in_words(number) == words


@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_an_override_switches_evaluation_off(name: str):
    path = CONFIGS / f"{name}.yaml"
    assert read_recipe(path).evaluation != Evaluation()
    recipe = read_recipe(path, {"eval_data": None})
    assert (recipe.eval_data, recipe.evaluation) == (None, Evaluation())
    assert recipe.checkpoints.every == read_recipe(path).checkpoints.every
    with pytest.raises(ConfigError, match="evaluation: has no effect without eval_data"):
        read_recipe(path, {"eval_data": None, "evaluation.every": 3})


def test_labels_of_the_classifier_are_the_packages(maker: ModuleType):
    recipe = read_recipe(CONFIGS / "llama_classification.yaml")
    assert recipe.eval_data is not None
    assert recipe.data.label_names == recipe.eval_data.label_names == maker.PACKAGES
    assert recipe.model.num_labels == len(maker.PACKAGES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=pytest.mark.ci if path.stem == IN_CI else pytest.mark.slow)
        for path in RECIPES
    ],
)
def test_each_runs(name: str, little_data: Path, tmp_path: Path):
    recipe, out = little_data / f"{name}.yaml", tmp_path / "run"
    command = [str(recipe), "--output-dir", str(out), "--max-steps", "2", "--quiet"]
    assert main([*command, "--no-compile-cache"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first = 0 if read_recipe(recipe).evaluation.at_start else 1
    assert [line["step"] for line in lines] == [*range(first, 3)]
    assert lines[-1]["eval_loss"] > 0
    assert (out / "report.html").exists()
    assert (out / "loss.png").exists()
    asks = bool(read_recipe(recipe).evaluation.metrics)
    assert ("eval_exact_match" in lines[-1]) == (out / BEFORE).exists() == asks


def test_without_its_data_a_recipe_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copy(CONFIGS / "t5_task.yaml", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    recipe = f"{tmp_path.name}/t5_task.yaml"
    assert main([recipe, "--output-dir", "run", "--no-compile-cache"]) == 2
    said = capsys.readouterr().err
    assert f"data.path: {tmp_path.name}/data/numbers_train.jsonl: no such file" in said
    assert len(said.splitlines()) == 1  # told before the model is made


def test_paths_of_a_recipe_are_relative_to_it_and_overrides_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.yaml").write_text(
        "model: {path: model, tokenizer: org/name}\n"
        "data: {format: text, path: [a.txt, /b.txt, ~/c.txt]}\n"
        "eval_data: {format: text, dataset: org/name}\n"
        "output_dir: runs\n"
    )
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.model.path == str(tmp_path / "model")
    assert recipe.data.path == (str(tmp_path / "a.txt"), "/b.txt", "~/c.txt")
    assert recipe.eval_data is not None
    assert recipe.model.tokenizer == recipe.eval_data.dataset == "org/name"  # on the Hub
    assert recipe.output_dir == "runs"
    assert read_recipe(tmp_path / "recipe.yaml", {"data.path": "x"}).data.path == "x"


def test_a_recipe_of_the_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path))
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [path.stem for path in RECIPES]
    path = find_recipe("t5_task")
    assert path.is_relative_to(tmp_path)
    data = read_recipe(path).data.path
    assert isinstance(data, str)
    assert Path(data).read_text().count("\n") == 9_500
    changed = Path(data).stat().st_mtime_ns
    assert find_recipe("t5_task") == path
    assert Path(data).stat().st_mtime_ns == changed
    monkeypatch.chdir(tmp_path)
    Path("t5_task").touch()
    assert find_recipe("t5_task") == Path("t5_task")  # a file goes first
    assert main(["t5_tas", "--output-dir", "run"]) == 2
    assert "no recipe of this name; is it t5_task?" in capsys.readouterr().err


def test_a_recipe_that_another_process_unpacks_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path))

    def write_twice(script: str) -> dict:
        def write_data(folder: Path) -> None:
            for each in (folder, folder.parent.parent / "data"):
                each.mkdir()
                (each / "rows").touch()

        return {"write_data": write_data}

    monkeypatch.setattr("runpy.run_path", write_twice)
    assert (find_recipe("t5_task").parent / "data" / "rows").exists()
