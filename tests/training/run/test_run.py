"""Runs as library calls: what they leave behind, what may go on where, and what stops them."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import go_on, measured, plain, run_of, saved, spoil, stops, tiny

from jaxllm import save_hf
from jaxllm.checkpoint import load
from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import CheckpointError, ConfigError, DataError, RunError
from jaxllm.models.weights import parameters
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import train


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe, and the folder of its run after four steps; saved at two and four."""
    folder = tmp_path_factory.mktemp("done")
    spec = tiny(folder)
    result = train(spec, quiet=True)
    assert (result.step, result.stopped_by) == (4, None)
    return spec, result.folder


@pytest.fixture
def copied(done: tuple[Recipe, Path], tmp_path: Path) -> Recipe:
    """The recipe with a run of its own that has gone four steps."""
    spec, folder = done
    shutil.copytree(folder, tmp_path / "run")
    return replace(spec, output_dir=str(tmp_path / "run"))


@pytest.mark.slow
def test_in_a_notebook(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Two runs in one process, which say nothing and are equal; the model answers."""
    first = train(tiny(tmp_path, output_dir=str(tmp_path / "a")), quiet=True)
    second = train(tiny(tmp_path, output_dir=str(tmp_path / "b")), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert saved(first.folder) == saved(second.folder)
    assert measured(first.folder) == measured(second.folder)
    assert first.metrics["loss"] == measured(first.folder)[-1]["loss"]
    one, other = parameters(first.model), parameters(second.model)
    assert all(np.array_equal(one[path], other[path]) for path in one)
    ids = np.array([first.tokenizer.encode("hello")])
    assert np.isfinite(first.model(ids).logits).all()


@pytest.mark.ci
def test_the_average_is_what_a_run_gives(done: tuple[Recipe, Path], tmp_path: Path):
    spec, _ = done
    bare = train(replace(spec, output_dir=str(tmp_path / "run"), ema_decay=None), quiet=True)
    averaged = train(replace(spec, output_dir=str(tmp_path / "run2")), quiet=True)
    weights = parameters(bare.model)
    assert any(not np.array_equal(x, weights[p]) for p, x in parameters(averaged.model).items())


@pytest.mark.ci
def test_what_a_run_leaves(done: tuple[Recipe, Path]):
    folder = done[1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens", "labels", "skipped"} <= lines[0].keys()
    with (folder / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in lines]
    assert {"run_card.json", "report.html", "loss.png"} <= {path.name for path in folder.iterdir()}


def test_a_second_run_in_the_folder(copied: Recipe):
    with pytest.raises(
        RunError, match=r"holds a run already, saved at step 4; continue it with --resume"
    ):
        train(copied, quiet=True)
    (run_of(copied) / "checkpoints").rename(run_of(copied) / "elsewhere")
    with pytest.raises(RunError, match="holds a run already; continue it with --resume"):
        train(copied, quiet=True)


@pytest.mark.ci
def test_resume_begins_where_nothing_is(done: tuple[Recipe, Path], tmp_path: Path):
    spec, folder = done
    spec = replace(spec, output_dir=str(tmp_path / "run"))
    assert go_on(spec).step == 4
    assert saved(run_of(spec)) == saved(folder)


@pytest.mark.ci
def test_lines_without_a_checkpoint_are_begun_anew(done: tuple[Recipe, Path], tmp_path: Path):
    """A run that was killed before its first checkpoint."""
    spec, folder = done
    (tmp_path / "run").mkdir()
    shutil.copy(folder / "metrics.jsonl", tmp_path / "run")
    spec = replace(spec, output_dir=str(tmp_path / "run"))
    go_on(spec)
    assert measured(run_of(spec)) == measured(folder)


@pytest.mark.ci
def test_going_on_at_the_end_changes_nothing(copied: Recipe):
    before = measured(run_of(copied)), saved(run_of(copied))
    assert go_on(copied).step == 4
    assert (measured(run_of(copied)), saved(run_of(copied))) == before


@pytest.mark.ci
def test_a_run_does_not_go_back(copied: Recipe):
    with pytest.raises(RunError, match="is at step 4, beyond its last one, 3"):
        go_on(copied, max_steps=3)


def test_settings_that_may_not_change(copied: Recipe):
    faster = replace(copied.optimizer, learning_rate=0.5)
    with pytest.raises(RunError, match=r"optimizer\.learning_rate: was 0\.01, is 0\.5"):
        go_on(copied, optimizer=faster)
    with pytest.raises(RunError, match=r"ema_decay: was 0\.9, is null; seed: was 0, is 1"):
        go_on(copied, seed=1, ema_decay=None)
    with pytest.raises(RunError, match=r"data\.packing: was false, is true"):
        go_on(copied, data=replace(copied.data, packing=True, bucket="power_of_two"))
    wider = {**(copied.model.config or {}), "intermediate_size": 32}
    with pytest.raises(RunError, match=r"model\.config\.intermediate_size: was 24, is 32"):
        go_on(copied, model=replace(copied.model, config=wider))
    assert measured(run_of(copied))[-1]["step"] == 4


@pytest.mark.ci
def test_settings_that_may_change(copied: Recipe, tmp_path: Path):
    moved = tmp_path / "moved.jsonl"
    shutil.copy(str(copied.data.path), moved)
    result = go_on(
        copied,
        max_steps=6,
        data=replace(copied.data, path=str(moved)),
        eval_data=copied.data,
        evaluation=replace(copied.evaluation, every=5),
        checkpoints=replace(copied.checkpoints, every=3, keep=1),
        mesh=replace(copied.mesh, data=1),
        log_every=1,
        skip_limit=3,
    )
    assert result.step == 6
    lines = measured(run_of(copied))
    assert ["eval_loss" in line for line in lines] == [False] * 4 + [True] * 2


def test_changed_data_are_refused(copied: Recipe, tmp_path: Path):
    changed = tmp_path / "changed.jsonl"
    changed.write_text(Path(str(copied.data.path)).read_text() + '{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"examples was .* only with the data"):
        go_on(copied, max_steps=6, data=replace(copied.data, path=str(changed)))


@pytest.mark.ci
def test_a_changed_base_is_refused(tmp_path: Path):
    """Under LoRA the base is in no checkpoint; its digests are."""
    bases = [tmp_path / "base0", tmp_path / "base1"]
    for seed, base in enumerate(bases):
        new = tiny(tmp_path, output_dir=str(tmp_path / f"new{seed}"), max_steps=1, seed=seed)
        result = train(new, quiet=True)
        save_hf(base, result.model, result.tokenizer)
    folder = tmp_path / "base"
    shutil.copytree(bases[0], folder)
    spec = tiny(tmp_path, model={"path": str(folder)}, lora={"rank": 2}, max_steps=2)
    train(spec, quiet=True)
    moved = replace(spec.model, path=str(bases[0]))
    assert go_on(spec, model=moved, max_steps=3).step == 3
    config = (folder / "config.json").read_text()
    changed = config.replace('"attention_dropout": 0.1', '"attention_dropout": 0.2')
    (folder / "config.json").write_text(changed)
    with pytest.raises(RunError, match=r"base model .* \(attention_dropout: was 0\.1, is 0\.2\)"):
        go_on(spec, max_steps=4)
    (folder / "config.json").write_text(config)
    (folder / "generation_config.json").write_text(
        '{"bos_token_id": 256, "eos_token_id": [256, 7]}'
    )
    with pytest.raises(RunError, match=r"base model .* \(eos_token_id: was 256, is \[256, 7\]\)"):
        go_on(spec, max_steps=4)
    shutil.rmtree(folder)
    shutil.copytree(bases[0], folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # no token differs
    with pytest.raises(RunError, match="tokenizer: was "):
        go_on(spec, max_steps=4)
    shutil.rmtree(folder)
    shutil.copytree(bases[1], folder)
    with pytest.raises(RunError, match=r"the base model is not the one .* tensors differ"):
        go_on(spec, max_steps=4)


@pytest.mark.ci
def test_a_run_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where half precision is the default of the device, its dtype is named, and can be given."""
    first = train(tiny(tmp_path, output_dir=str(tmp_path / "new"), max_steps=1), quiet=True)
    save_hf(tmp_path / "base", first.model, first.tokenizer, dtype="bfloat16")
    spec = tiny(tmp_path, model={"path": str(tmp_path / "base")}, lora={"rank": 2}, max_steps=1)
    train(spec, quiet=True)
    monkeypatch.setattr(load, "default_dtype", lambda dtypes: np.dtype(jnp.bfloat16))
    with pytest.raises(RunError, match=r'model\.dtype: was "float32", is "bfloat16"'):
        go_on(spec, max_steps=2)
    # The frozen weights are the same, kept in bfloat16.
    given = replace(spec, model=replace(spec.model, dtype="float32"))
    assert go_on(given, max_steps=2).step == 2
    with jax.default_matmul_precision("highest"), pytest.raises(RunError, match="matmul_precision"):
        go_on(given, max_steps=3)
    faster = replace(given, model=replace(given.model, matmul_precision="default"))
    with pytest.raises(RunError, match="matmul_precision"):
        go_on(faster, max_steps=3)


@pytest.mark.ci
def test_a_kill_before_a_deletion_leaves_no_step_too_many(tmp_path: Path):
    spec = tiny(tmp_path, checkpoints={"every": 1, "keep": 1}, max_steps=2)
    train(replace(spec, checkpoints=replace(spec.checkpoints, keep=2)), quiet=True)
    folder = run_of(spec) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1", "2"]
    go_on(spec)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["2"]


@pytest.mark.ci
def test_a_damaged_checkpoint_is_passed_over(
    copied: Recipe, done: tuple[Recipe, Path], caplog: pytest.LogCaptureFixture
):
    folder = run_of(copied)
    spoil(folder, 4)
    assert go_on(copied).step == 4
    assert f"{folder / 'checkpoints' / '4'}: cannot be restored" in caplog.text
    assert saved(folder) == saved(done[1])
    assert measured(folder) == measured(done[1])
    assert (folder / "checkpoints" / "4.damaged").is_dir()


@pytest.mark.ci
def test_a_damaged_record_is_passed_over(copied: Recipe, done: tuple[Recipe, Path]):
    folder = run_of(copied)
    (folder / "checkpoints" / "4" / "record" / "metadata").write_text("{}")
    assert go_on(copied).step == 4
    assert saved(folder) == saved(done[1])


@pytest.mark.ci
def test_no_checkpoint_is_sound(copied: Recipe):
    folder = run_of(copied)
    spoil(folder, 2)
    spoil(folder, 4)
    lines = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be restored: step 4: .*step 2: "):
        go_on(copied, max_steps=6)
    for step in (2, 4):
        (folder / "checkpoints" / str(step) / "record" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be restored: step 4: .*step 2: "):
        go_on(copied, max_steps=6)
    assert (folder / "metrics.jsonl").read_bytes() == lines


def test_one_writer(copied: Recipe):
    with (
        RunCheckpoints(run_of(copied) / "checkpoints"),
        pytest.raises(RunError, match=r"process \d+ on .* is writing here"),
    ):
        go_on(copied, max_steps=6)
    with (
        RunCheckpoints(run_of(copied) / "checkpoints"),
        pytest.raises(RunError, match=r"process \d+ on .* is writing here"),
    ):
        train(copied, quiet=True)


@pytest.mark.ci
def test_a_stop_saves_and_going_on_is_exact(done: tuple[Recipe, Path], tmp_path: Path):
    spec, folder = done
    spec = replace(spec, output_dir=str(tmp_path / "run"))
    result = train(spec, quiet=True, stop=stops(3))
    assert (result.step, result.stopped_by) == (3, 15)
    assert measured(run_of(spec))[-1]["step"] == 3
    assert go_on(spec).step == 4
    assert saved(run_of(spec)) == saved(folder)
    assert measured(run_of(spec)) == measured(folder)


@pytest.mark.ci
def test_a_file_that_cannot_be_written(copied: Recipe):
    for name in ("metrics.csv", "report.html"):
        path = run_of(copied) / name
        path.unlink()
        path.mkdir()
        with pytest.raises(RunError, match=f"{name}: cannot be written"):
            go_on(copied)
        path.rmdir()


@pytest.mark.ci
def test_a_stop_before_the_first_step(tmp_path: Path):
    result = train(tiny(tmp_path), quiet=True, stop=lambda: 2)
    assert (result.step, result.stopped_by) == (0, 2)
    assert saved_steps(result.folder) == []


def saved_steps(folder: Path) -> list[int]:
    with RunCheckpoints(folder / "checkpoints", writable=False) as checkpoints:
        return checkpoints.steps()


# A square of 1e25 is beyond float32.
def regression(folder: Path, labels: list[float], **changes: Any) -> Recipe:
    """One row a step, in order; dropout and average as in the others."""
    rows = ({"text": f"row {n}", "label": label} for n, label in enumerate(labels))
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = plain(folder)["model"]["config"] | {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
        "pad_token_id": 257,
    }
    return tiny(
        folder,
        model={"config": config, "tokenizer": "bytes"},
        data={
            "path": str(folder / "labels.jsonl"),
            "format": "classification",
            "max_length": 32,
            "bucket": None,
            "shuffle": False,
        },
        batch_size=1,
        max_steps=len(labels),
        skip_limit=3,
        **changes,
    )


@pytest.mark.ci
def test_a_batch_without_a_gradient_is_skipped_and_counted(tmp_path: Path):
    spec = regression(tmp_path, [1.0, 1e25, 0.5, 1e25, 1e25, 0.25], checkpoints={"every": 1})
    spec = replace(spec, checkpoints=replace(spec.checkpoints, keep=6))
    result = train(spec, quiet=True)
    assert result.step == 6
    lines = measured(result.folder)
    assert [line["skipped"] for line in lines] == [0, 1, 0, 1, 1, 0]
    assert all(np.isfinite(x).all() for x in parameters(result.model).values())
    steps = [saved(result.folder, step)[0] for step in range(1, 7)]
    for step, skipped in enumerate([1, 0, 1, 1, 0], start=1):
        kept = [n for n in steps[step] if n.startswith(("params", "opt_state", "ema"))]
        same = all(steps[step][name] == steps[step - 1][name] for name in kept)
        assert same == bool(skipped)
    # The learning rate counts what was learnt from.
    assert lines[1]["lr"] == lines[2]["lr"]


@pytest.mark.ci
def test_one_output_is_a_regression(tmp_path: Path):
    spec = regression(tmp_path, [1.0, 0.5])
    line = measured(train(replace(spec, eval_data=spec.data), quiet=True).folder)[-1]
    assert "accuracy" not in line
    assert "eval_accuracy" not in line
    assert line["eval_mse"] == line["eval_loss"]


@pytest.mark.ci
def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path):
    spec = regression(tmp_path, [1.0, 1e25, 1e25, 0.5, 1e25, 1e25, 1e25, 0.25])
    with pytest.raises(RunError, match=r"step 7: 3 batches in a row gave no finite gradient"):
        train(spec, quiet=True)
    assert saved_steps(run_of(spec)) == [4, 6]
    assert [line["skipped"] for line in measured(run_of(spec))] == [0, 1, 1, 0, 1, 1, 1]
    with pytest.raises(RunError, match="step 7: 3 batches"):
        go_on(spec)


@pytest.mark.ci
def test_weights_beyond_all_numbers_end_the_run(tmp_path: Path):
    spec = tiny(tmp_path, max_steps=20, skip_limit=4, optimizer={"learning_rate": 1e38})
    with pytest.raises(RunError, match="4 batches in a row gave no finite gradient; lower optimi"):
        train(spec, quiet=True)


@pytest.mark.by_default("changes2-output_dir: missing; name the folder")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoints": {"metric": "eval_los"}}, "unknown metric 'eval_los'; use eval_loss"),
        ({"evaluation": {"metrics": ["exact_match"]}}, "format 'text' have no answers"),
        ({"output_dir": None}, "output_dir: missing; name the folder"),
    ],
)
def test_what_cannot_work_ends_before_the_first_step(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    spec = tiny(tmp_path, eval_data=plain(tmp_path)["data"], **changes)
    with pytest.raises(ConfigError, match=message):
        train(spec, quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
