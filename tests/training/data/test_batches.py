"""Batches: nothing lost or doubled, the same on any number of processes, resumed exactly."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, epoch_batches, make_batches
from jaxllm.training.data.batches import Batches
from jaxllm.training.data.examples import CausalExample, Counts, Examples
from jaxllm.training.data.plan import Planner

BYTES = byte_tokenizer()
CAUSAL = ModelInfo(kind="causal", vocab_size=258, context_length=48, pad_token_id=256)
T5 = ModelInfo(kind="seq2seq", vocab_size=258, pad_token_id=0)
CLASSES = ModelInfo(kind="classification", vocab_size=258, context_length=48, num_labels=3)
FLOATS = ModelInfo(
    kind="classification",
    vocab_size=258,
    context_length=48,
    num_labels=3,
    problem_type="multi_label_classification",
)
RNG = np.random.default_rng(3)
ROWS = [
    {
        "text": f"{n}:" + "t" * int(RNG.integers(0, 40)),
        "prompt": f"{n}?" + "q" * int(RNG.integers(0, 30)),
        "completion": "c" * int(RNG.integers(0, 10)),
        "source": f"{n}=" + "s" * int(RNG.integers(0, 20)),
        "target": f"{n}" + "y" * int(RNG.integers(0, 9)),
        "label": n % 3,
        "labels": [n % 3],
    }
    for n in range(53)
]
SETUPS = {
    "text": (DataConfig(format="text"), CAUSAL),
    "packed": (DataConfig(format="prompt_completion", packing=True), CAUSAL),
    "seq2seq": (DataConfig(format="seq2seq", max_length=32, bucket=8), T5),
    "packed pairs": (
        DataConfig(format="seq2seq", max_length=48, max_target_length=20, packing=True),
        T5,
    ),
    "classes": (DataConfig(format="classification", bucket=None), CLASSES),
    "floats": (DataConfig(format="classification", label_field="labels"), FLOATS),
}
each_setup = pytest.mark.parametrize("name", SETUPS)


def batches_of(name: str, batch_size: int = 8, **options):
    config, model = SETUPS[name]
    return make_batches(config, BYTES, model=model, batch_size=batch_size, rows=ROWS, **options)


def evaluation_of(name: str, batch_size: int = 8, **options):
    config, model = SETUPS[name]
    return epoch_batches(config, BYTES, model=model, batch_size=batch_size, rows=ROWS, **options)


def documents(name: str, batch: dict) -> list[tuple]:
    """The examples of a batch, read back from its arrays alone."""
    numbers = batch["segment_ids"] if "packed" in name else batch["attention_mask"]
    sides = {"packed": numbers, "text": numbers, "packed pairs": batch.get("decoder_segment_ids")}
    actual = []
    for row, column in enumerate(numbers):
        for number in range(1, column.max() + 1):
            labels = batch["labels"][row]
            if sides.get(name) is not None:
                labels = labels[sides[name][row] == number]
            actual.append(document(batch["input_ids"][row][column == number], labels))
    return actual


def document(tokens: np.ndarray, labels: np.ndarray) -> tuple:
    """Tokens, and the labels that count, in a form that can be compared."""
    learnt = labels[labels != -100] if labels.ndim else labels
    return tuple(tokens.tolist()), tuple(np.atleast_1d(learnt).tolist())


def expected_documents(examples: Examples) -> list[tuple]:
    return [document(example.input_ids, example.labels) for example in examples.items]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.in_ci("packed")
@each_setup
def test_every_row_once_in_every_epoch(name):
    batches = batches_of(name, epochs=3)
    epochs: list[list[tuple]] = [[], [], []]
    for batch in batches:
        epochs[batches.epoch] += documents(name, batch)
    expected = expected_documents(batches.examples)
    assert len(set(expected)) == len(ROWS)
    assert [sorted(actual) for actual in epochs] == [sorted(expected)] * 3
    assert epochs[0] != epochs[1]
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.in_ci("packed")
@each_setup
def test_arrays_are_what_models_take(name):
    batch = next(batches_of(name))
    packed = "packed" in name
    assert ("segment_ids" in batch) == packed == ("attention_mask" not in batch)
    assert ("decoder_segment_ids" in batch) == (name == "packed pairs")
    assert ("weights" in batch) == (name == "floats")
    kinds = {key: array.dtype for key, array in batch.items() if array.dtype != np.int32}
    floats = {"labels": np.dtype("float32"), "weights": np.dtype("float32")}
    assert kinds == (floats if name == "floats" else {})
    assert all(len(array) == 8 for array in batch.values())
    mask = batch["segment_ids"] if packed else batch["attention_mask"]
    assert mask.shape == batch["input_ids"].shape
    assert (batch["input_ids"][mask == 0] == (SETUPS[name][1].pad_token_id or 0)).all()
    shape = batch["labels"].shape
    if name in ("text", "packed"):
        assert shape == mask.shape
        assert (batch["labels"][mask == 0] == -100).all()
        first = np.diff(mask, prepend=0, axis=1) > 0
        assert (batch["labels"][first] == -100).all()
    elif name == "packed pairs":
        assert shape == (8, 20)
        ends = batch["decoder_segment_ids"].max(axis=1)
        assert (ends == mask.max(axis=1)).all()
    elif name in ("classes", "floats"):
        assert shape == ((8,) if name == "classes" else (8, 3))


@pytest.mark.by_default("2-classes")
@each_setup
@pytest.mark.parametrize("count", [2, 4, 8])
def test_order_does_not_depend_on_the_number_of_processes(name, count):
    full = batches_of(name, epochs=2)
    parts = [batches_of(name, epochs=2, process_index=n, process_count=count) for n in range(count)]
    for batch in full:
        shards = [next(part) for part in parts]
        joined = {key: np.concatenate([shard[key] for shard in shards]) for key in batch}
        assert same(joined, batch)
    assert all(next(part, None) is None for part in parts)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["text", "packed", "packed pairs"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_restored_position_goes_on_exactly(name, data):
    """Across epochs, through JSON, into fresh batches and into ones that were elsewhere."""
    position = data.draw(st.integers(0, 30))
    elsewhere = data.draw(st.integers(0, 20))
    batches = batches_of(name)
    for _ in range(position):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    expected = [next(batches) for _ in range(12)]
    again = batches_of(name)
    for _ in range(elsewhere):
        next(again)
    again.restore(state)
    assert again.state() == state
    assert all(same(next(again), batch) for batch in expected)
    assert again.state() == batches.state()


def test_restored_on_another_number_of_processes():
    batches = batches_of("packed")
    for _ in range(5):
        next(batches)
    state = batches.state()
    parts = [batches_of("packed", process_index=n, process_count=2) for n in range(2)]
    for part in parts:
        part.restore(state)
    for _ in range(20):
        batch, shards = next(batches), [next(part) for part in parts]
        assert same({k: np.concatenate([s[k] for s in shards]) for k in batch}, batch)


@pytest.mark.by_default("change4-packing was False")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "batch_size was 8 and is now 4"),
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"rows": ROWS[:-1]}, "examples was '[0-9a-f]+' and is now"),
        ({"config": DataConfig(format="text", bucket=8)}, "bucket was 'power_of_two' and is now 8"),
        ({"config": DataConfig(format="text", packing=True)}, "packing was False"),
        ({"config": DataConfig(format="text", shuffle=False)}, "shuffle was True"),
        ({"config": DataConfig(format="text", max_length=47)}, r"max_length was \[48\]"),
    ],
)
def test_state_of_another_run_is_refused(change, message):
    state = batches_of("text").state()
    arguments = {"config": SETUPS["text"][0], "rows": ROWS, "batch_size": 8, **change}
    config = arguments.pop("config")
    other = make_batches(config, BYTES, model=CAUSAL, **arguments)
    with pytest.raises(DataError, match=message):
        other.restore(state)


@pytest.mark.by_default("change1-batch is 1.0")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "epoch is -1, .*; resume from another checkpoint"),
        ({"batch": 1.0}, "batch is 1.0"),
        ({"batch": True}, "batch is True"),
        ({"batch": 8}, "batch 8 of epoch 0, which has 7; resume from another checkpoint"),
        ({"epoch": 2}, r"epoch 2, but there are 2 .*; resume from another checkpoint"),
        ({"more": 1}, "expected the fields .* found .*more"),
    ],
)
def test_impossible_states_are_refused(change, message):
    batches = batches_of("text", epochs=2)
    with pytest.raises(DataError, match=message):
        batches.restore({**batches.state(), **change})
    with pytest.raises(DataError, match="expected the fields"):
        batches.restore({})
    assert batches.state() == batches_of("text").state()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_without_shuffle_rows_are_in_the_order_of_the_files(packing, streaming, tmp_path):
    """Also with the default bucket, and in every epoch."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in ROWS))
    options = {"shuffle": False, "packing": packing, "streaming": streaming}
    config = DataConfig(format="text", path=str(path), **options)
    batches = make_batches(config, BYTES, model=CAUSAL, batch_size=8, epochs=2)
    documents = [
        bytes(token for token in row if token < 256).decode()
        for batch in batches
        for row in batch["input_ids"]
    ]
    assert "".join(documents) == 2 * "".join(row["text"] for row in ROWS)


@pytest.mark.ci
def test_a_far_position_is_reached_at_once():
    """Epoch 10,000 of 20,000 examples, and its last batch: nothing before it is made."""
    one = CausalExample.of(np.arange(1, 6, dtype=np.int32))
    examples = Examples((one,) * 20_000, Counts(), "")
    batches = Batches(examples, CAUSAL, Planner(4, (48,)))
    state = {**batches.state(), "epoch": 10_000, "batch": 4_999}
    start = time.process_time()
    batches.restore(state)
    next(batches)
    assert time.process_time() - start < 2
    assert (batches.epoch, batches.batch) == (10_000, 5_000)
    next(batches)
    assert (batches.epoch, batches.batch) == (10_001, 1)


@pytest.mark.by_default(
    "1-classes", "1-floats", "1-packed", "1-packed pairs", "1-seq2seq", "1-text", "2-classes"
)
@each_setup
@pytest.mark.parametrize("count", [1, 2, 16])
def test_evaluation_counts_every_row_once(name, count):
    """Also with several processes, some of which have rows of padding only in the last batch."""
    parts = [evaluation_of(name, 16, process_index=n, process_count=count) for n in range(count)]
    assert len({len(part) for part in parts}) == 1
    actual, learnt, rows = [], 0, 0
    for part in parts:
        for batch in part:
            assert len(batch["input_ids"]) == 16 // count
            actual += documents(name, batch)
            rows += len(batch["input_ids"])
            counted = batch["weights"] if name == "floats" else batch["labels"] != -100
            learnt += int(counted.sum())
    examples = parts[0].examples
    assert sorted(actual) == sorted(expected_documents(examples))
    assert learnt == examples.counts.learnt
    assert rows == 16 * len(parts[0])


@pytest.mark.by_default("classes")
@each_setup
def test_evaluation_is_the_same_every_time(name):
    once, twice = evaluation_of(name), evaluation_of(name)
    assert all(same(a, b) for a, b in zip(once, twice, strict=True))
    assert len(list(once)) == len(list(once)) == len(once)


def test_evaluation_in_memory_is_planned_once_and_can_be_indexed(monkeypatch):
    plan, planned = Planner.plan, []
    monkeypatch.setattr(Planner, "plan", lambda *args: planned.append(1) or plan(*args))
    batches = evaluation_of("text")
    listed, again = list(batches), list(batches)
    assert batches
    assert len(listed) == len(again) == len(batches)
    assert all(same(batches[n], batch) for n, batch in enumerate(listed))
    members = [n for batch in batches.members for n in batch]
    assert sorted(members) == list(range(len(ROWS)))
    masks = np.concatenate([batch["attention_mask"].ravel() for batch in listed])
    assert batches.padding == pytest.approx(1 - masks.mean())
    assert len(planned) == 1


@pytest.mark.parametrize("name", ["seed", "epochs"])
def test_evaluation_has_no_order_and_no_number_of_epochs(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        evaluation_of("text", **{name: 2})


def test_fewer_rows_than_a_batch():
    batches = make_batches(
        SETUPS["text"][0], BYTES, model=CAUSAL, batch_size=8, rows=ROWS[:3], epochs=2
    )
    actual = list(batches)
    assert [len(documents("text", batch)) for batch in actual] == [3, 3]
    assert actual[0]["input_ids"].shape[0] == 8


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="8 rows cannot be divided among 3 processes"):
        batches_of("text", process_count=3)
    with pytest.raises(ConfigError, match="process_index: expected 0 to 1, found 2"):
        batches_of("text", process_index=2, process_count=2)
    with pytest.raises(ConfigError, match="batch_size: 0"):
        batches_of("text", batch_size=0)
    with pytest.raises(ConfigError, match="epochs: expected 1 or more"):
        batches_of("text", epochs=0)
    with pytest.raises(ConfigError, match="give the files of the data"):
        make_batches(SETUPS["text"][0], BYTES, model=CAUSAL, batch_size=8)
    with pytest.raises(ConfigError, match="no effect when rows are given"):
        make_batches(
            DataConfig(format="text", path="x"), BYTES, model=CAUSAL, batch_size=8, rows=ROWS
        )
