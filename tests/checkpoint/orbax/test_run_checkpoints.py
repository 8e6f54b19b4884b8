"""RunCheckpoints: round trips, which steps are kept, and errors."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_states import Moments, bits, like, meta, state

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import CheckpointError, InputError, MissingFileError, RunError


@pytest.fixture
def problems():
    return []


@pytest.fixture
def checkpoints(tmp_path, problems):
    with RunCheckpoints(tmp_path / "run", keep=3, on_problem=problems.append) as opened:
        yield opened


def save_all(checkpoints, steps) -> None:
    for step in steps:
        checkpoints.save(step, state(step), meta(step))
    checkpoints.wait()


def assert_restored(restored, step: int) -> None:
    assert restored.step == step
    assert restored.meta == meta(step)
    assert bits(restored.arrays) == bits(state(step))
    assert jax.tree.structure(restored.arrays) == jax.tree.structure(state(step))


@pytest.mark.ci
def test_round_trip_of_every_array_type(checkpoints):
    save_all(checkpoints, [1, 2])
    assert_restored(checkpoints.restore(target=like(state(0))), 2)
    assert_restored(checkpoints.restore(1, like(state(0))), 1)
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.latest() == 2


def test_restore_in_another_process(tmp_path):
    with RunCheckpoints(tmp_path, keep=1) as checkpoints:
        save_all(checkpoints, [3])
    with RunCheckpoints(tmp_path, writable=False) as checkpoints:
        assert_restored(checkpoints.restore(target=like(state(0))), 3)
        with pytest.raises(RunError, match="opened for reading"):
            checkpoints.save(4, state(4), {})


@pytest.mark.ci
def test_arrays_may_be_donated_while_they_are_written(checkpoints):
    """On a CPU a host copy may be a view of the very memory that is donated."""
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree), donate_argnums=0)
    large = {str(i): jnp.full((1000, 1000), i, jnp.float32) for i in range(8)}
    checkpoints.save(0, large, None)
    spoil(large)
    target = {str(i): jax.ShapeDtypeStruct((1000, 1000), jnp.float32) for i in range(8)}
    restored = checkpoints.restore(target=target)
    for i in range(8):
        assert (restored.arrays[str(i)] == i).all()


def test_on_saved_is_called_after_the_commit(tmp_path):
    reports = []

    def on_saved(step, seconds, size):
        files = [p for p in (tmp_path / str(step)).rglob("*") if p.is_file()]
        reports.append((step, seconds > 0, size == sum(p.stat().st_size for p in files) > 5000))

    with RunCheckpoints(tmp_path, on_saved=on_saved) as checkpoints:
        save_all(checkpoints, [1, 2])
    assert reports == [(1, True, True), (2, True, True)]


@pytest.mark.ci
def test_last_steps_and_best_step_are_kept(tmp_path):
    for mode, metrics, best in (("min", [3, 1, 2, 4, 5], 2), ("max", [3, 9, 2, 9, 5], 2)):
        folder = tmp_path / mode
        with RunCheckpoints(folder, keep=1, mode=mode) as checkpoints:
            assert checkpoints.best() is None
            for step, metric in enumerate([*metrics, None, float("nan")], start=1):
                checkpoints.save(step, {"x": jnp.int32(step)}, {}, metric=metric)
            checkpoints.wait()
            assert checkpoints.best() == best
            assert checkpoints.steps() == [best, 7]
        assert sorted(p.name for p in folder.iterdir()) == [str(best), "7", "writer.lock"]


def test_old_step_is_deleted_after_the_commit(tmp_path):
    seen = []
    with RunCheckpoints(tmp_path, keep=1, on_saved=lambda *_: seen.append(there())) as checkpoints:

        def there():
            return checkpoints.steps()

        save_all(checkpoints, [1, 2, 3])
    assert seen == [[1], [1, 2], [2, 3]]


def test_new_step_with_a_smaller_number_is_kept(tmp_path):
    with RunCheckpoints(tmp_path, keep=1) as checkpoints:
        save_all(checkpoints, [9, 5])
        assert checkpoints.steps() == [5, 9]


def test_empty_folder_is_not_a_step(checkpoints, problems):
    save_all(checkpoints, [1])
    (checkpoints.folder / "9").mkdir()
    for name in ("notes", "007", "-3", "٣"):
        (checkpoints.folder / name).mkdir()
    assert checkpoints.steps() == [1]
    assert checkpoints.latest() == 1
    assert_restored(checkpoints.restore(target=like(state(0))), 1)
    assert len(problems) == 1
    assert "/9: cannot be restored: " in problems[0]
    save_all(checkpoints, [9])
    assert checkpoints.steps() == [1, 9]


@pytest.mark.ci
def test_damaged_step_is_reported_skipped_and_renamed(checkpoints, problems):
    save_all(checkpoints, [1, 2, 3])
    (checkpoints.folder / "3" / "record" / "metadata").write_text("{}")
    shutil.rmtree(checkpoints.folder / "2" / "arrays" / "d")
    assert_restored(checkpoints.restore(target=like(state(0))), 1)
    assert [line.split(":")[0].rsplit("/", 1)[1] for line in problems] == ["3", "2"]
    assert "not the record of a checkpoint" in problems[0]
    save_all(checkpoints, [2, 3])
    assert_restored(checkpoints.restore(target=like(state(0))), 3)
    assert len(problems) == 2
    assert (checkpoints.folder / "2.damaged").is_dir()


def test_error_lists_all_damaged_steps(checkpoints, problems):
    save_all(checkpoints, [1, 2])
    for step in (1, 2):
        (checkpoints.folder / str(step) / "record" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be restored: step 2: .*step 1: "):
        checkpoints.restore(target=like(state(0)))
    with pytest.raises(CheckpointError, match=r"no checkpoint can be restored: step 2: [^;]*$"):
        checkpoints.restore(2, like(state(0)))


def test_problems_are_logged_by_default(tmp_path, caplog):
    with RunCheckpoints(tmp_path) as checkpoints:
        save_all(checkpoints, [1])
        (tmp_path / "2").mkdir()
        with caplog.at_level(logging.WARNING, "jaxllm"):
            checkpoints.restore(target=like(state(0)))
    assert [r.name for r in caplog.records if "/2: cannot" in r.getMessage()] == ["jaxllm"]


def test_renamed_step_is_refused(checkpoints, problems):
    save_all(checkpoints, [1])
    shutil.copytree(checkpoints.folder / "1", checkpoints.folder / "5")
    assert_restored(checkpoints.restore(target=like(state(0))), 1)
    assert "of step 1, not of step 5" in problems[0]


def test_missing_steps(tmp_path):
    with RunCheckpoints(tmp_path / "none", writable=False) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(MissingFileError, match="no checkpoint"):
            checkpoints.restore(target={})
    with RunCheckpoints(tmp_path) as checkpoints:
        save_all(checkpoints, [1])
        with pytest.raises(MissingFileError, match="no checkpoint of step 2; there are 1"):
            checkpoints.restore(2, like(state(0)))


@pytest.mark.by_default("change0-/1: mask is bool\\\\[33\\\\], but bool\\\\[32\\\\] is expected")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": jnp.zeros(32, bool)}, r"/1: mask is bool\[33\], but bool\[32\] is expected"),
        ({"mask": jnp.zeros(33)}, r"mask is bool\[33\], but float32\[33\] is expected"),
        ({"key": jax.random.PRNGKey(0)}, r"key is key<fry>\[\], but uint32\[2\] is expected"),
        ({"new": jnp.zeros(1)}, r"do not fit; missing: new$"),
        ({"params": {}}, r"do not fit; unexpected: params/b, params/blocks.0.w$"),
        (
            {"more": [jnp.zeros(1)] * 12, "params": {"b": jnp.zeros(1)}},
            r"missing: more/0, .*more/9 and 2 more; unexpected: params/blocks.0.w$",
        ),
    ],
)
def test_target_that_does_not_match(checkpoints, problems, change, message):
    """Is an error at once: an older step would not fit better."""
    save_all(checkpoints, [0, 1])
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(target=like(state(0) | change))
    assert problems == []


def test_restore_a_subset(checkpoints):
    save_all(checkpoints, [1])
    target = {"params": like(state(0)["params"])}
    restored = checkpoints.restore(target=target, subset=True)
    assert bits(restored.arrays) == bits(state(1)["params"])
    with pytest.raises(CheckpointError, match="missing: other"):
        checkpoints.restore(target=target | {"other": jnp.zeros(1)}, subset=True)


def test_read_record(checkpoints, problems):
    checkpoints.save(1, state(1), meta(1), metric=0.5)
    save_all(checkpoints, [2])
    assert checkpoints.read(1).metric == 0.5
    record = checkpoints.read()
    assert (record.step, record.meta) == (2, meta(2))
    assert str(record.leaves["opt_state/0/mu/w"]) == "float32[33, 40]"
    assert str(record.leaves["key"]) == "key<fry>[]"
    (checkpoints.folder / "2" / "record" / "metadata").write_text("{")
    assert checkpoints.read().step == 1
    assert "not JSON" in problems[0]


def test_array_paths_do_not_depend_on_classes(checkpoints):
    tree = {"opt_state": Moments(jnp.int32(1), {"w": jnp.ones(2)})}
    checkpoints.save(1, tree, {})
    plain = {"opt_state": {"count": jnp.int32(0), "mu": {"w": jnp.zeros(2)}}}
    assert bits(checkpoints.restore(target=plain).arrays) == bits(tree)


@pytest.mark.by_default("arrays0-meta0-x: expected a jax.Array, found ndarray")
@pytest.mark.parametrize(
    ("arrays", "meta", "message"),
    [
        ({"x": np.ones(3)}, {}, "x: expected a jax.Array, found ndarray"),
        ({"x": 1.0}, {}, "x: expected a jax.Array, found float"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {}, "two arrays have the path 'a/b'"),
        ({"x": jnp.ones(1, jnp.complex64)}, {}, "arrays of complex64 cannot be saved"),
        ({"x": jnp.ones(1)}, {"a": {1, 2}}, "meta: not JSON"),
        ({"x": jnp.ones(1)}, {"a": float("nan")}, "meta: not JSON"),
        ({"x": jnp.ones(1)}, {"a": (1, 2)}, "meta: JSON would change it"),
        ({"x": jnp.ones(1)}, {1: 2}, "meta: JSON would change it"),
        ({"x": jnp.ones(1)}, {"a": "\ud800"}, "unpaired surrogate"),
    ],
)
def test_invalid_values_are_refused_before_writing(checkpoints, arrays, meta, message):
    save_all(checkpoints, [1])
    before = sorted(p.name for p in checkpoints.folder.iterdir())
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(2, arrays, meta)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == before
    save_all(checkpoints, [2])


def test_existing_step_is_not_overwritten(checkpoints):
    save_all(checkpoints, [1])
    with pytest.raises(CheckpointError, match="there is a checkpoint of this step already"):
        checkpoints.save(1, state(1), {})


def test_invalid_arguments(tmp_path):
    with pytest.raises(InputError, match="keep"):
        RunCheckpoints(tmp_path, keep=0)
    with pytest.raises(InputError, match="mode"):
        RunCheckpoints(tmp_path, mode="lowest")  # pyright: ignore[reportArgumentType]
    with RunCheckpoints(tmp_path) as checkpoints, pytest.raises(InputError, match="step"):
        checkpoints.save(-1, {}, {})


def test_a_folder_that_orbax_cannot_name(tmp_path):
    """Its first save would fail, after the steps before it."""
    with pytest.raises(RunError, match="Orbax takes names in UTF-8 alone"):
        RunCheckpoints(tmp_path / os.fsdecode(b"\xff"))


def test_a_folder_that_is_removed_meanwhile(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "run")
    checkpoints.save(1, {"x": jnp.zeros(3)}, {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")  # Orbax would make the folder again
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=r"step 2 was not saved .*; there is no other step"):
        checkpoints.save(2, {"x": jnp.zeros(3)}, {})
    assert threading.active_count() <= before  # none that waits for the folder


def test_one_writer_and_any_readers(checkpoints):
    with pytest.raises(RunError, match="is writing here"):
        RunCheckpoints(checkpoints.folder)
    save_all(checkpoints, [1])
    with RunCheckpoints(checkpoints.folder, writable=False) as reader:
        assert_restored(reader.restore(target=like(state(0))), 1)
    checkpoints.close()
    checkpoints.close()
    with RunCheckpoints(checkpoints.folder) as again:
        assert again.steps() == [1]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    for name in ("7.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-12", "3.deleting"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in ("mine.deleting", "plots"):
        (tmp_path / name).mkdir()
    with RunCheckpoints(tmp_path):
        names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["mine.deleting", "plots", "writer.lock"]


def test_callback_error_is_not_a_failed_save(tmp_path):
    def on_saved(*_):
        raise ZeroDivisionError

    with RunCheckpoints(tmp_path, on_saved=on_saved) as checkpoints:
        checkpoints.save(1, state(1), {})
        with pytest.raises(ZeroDivisionError):
            checkpoints.wait()
        assert checkpoints.steps() == [1]


DISK_FULL = """
import resource, sys
import jax.numpy as jnp, numpy as np
from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import CheckpointError

large = {"x": jnp.array(np.random.default_rng(0).standard_normal(500_000), jnp.float32)}
saved = []
checkpoints = RunCheckpoints(sys.argv[1], on_saved=lambda step, *_: saved.append(step))
checkpoints.save(1, {"x": large["x"][:100]}, {})
checkpoints.wait()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), unlimited[1]))
for surface in (checkpoints.wait, lambda: checkpoints.save(3, large, {})):
    try:
        checkpoints.save(2, large, {})
        surface()
    except CheckpointError as error:
        assert "step 2 was not saved (" in str(error), error
    else:
        sys.exit("no error")
    assert saved == [1] and checkpoints.steps() == [1], (saved, checkpoints.steps())
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
checkpoints.save(2, large, {})
checkpoints.wait()
assert saved == [1, 2]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), unlimited[1]))
checkpoints.save(3, large, {})
checkpoints.close()
"""


@pytest.mark.ci
@pytest.mark.parametrize("limit", [100, 50_000])
def test_full_disk_leaves_earlier_steps_intact(tmp_path, limit):
    # -B: of a module that it imports Python would keep the bytes that the limit lets through.
    command = [sys.executable, "-B", "-c", DISK_FULL, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ERROR:" not in done.stderr
    assert "never retrieved" not in done.stderr
    raised = [line for line in done.stderr.splitlines() if "CheckpointError: " in line]
    assert raised, done.stderr
    assert "step 3 was not saved" in raised[-1]
    assert "File too large" in raised[-1]
    assert "the steps before it are intact" in raised[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "writer.lock"]
    with RunCheckpoints(tmp_path, writable=False) as checkpoints:
        target = {"x": jax.ShapeDtypeStruct((500_000,), jnp.float32)}
        x = checkpoints.restore(2, target).arrays["x"]
        expected = np.random.default_rng(0).standard_normal(500_000)
        np.testing.assert_array_equal(x, expected.astype(np.float32))
        assert checkpoints.restore(1, {"x": jax.ShapeDtypeStruct((100,), jnp.float32)})


def test_record_checksum_covers_its_text(checkpoints, problems):
    save_all(checkpoints, [1, 2])
    path = checkpoints.folder / "2" / "record" / "metadata"
    sealed = json.loads(path.read_text())
    sealed["record"] = sealed["record"].replace('"epoch": 2', '"epoch": 3')
    path.write_text(json.dumps(sealed))
    assert_restored(checkpoints.restore(target=like(state(0))), 1)
    assert "the text and its checksum differ" in problems[0]
