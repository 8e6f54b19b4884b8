"""Labels of classifiers: numbers, names, several of them, regressions."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.formats import ClassificationFormat, Labels, labels_of

SINGLE = Labels("single_label_classification", 3, ("no", "maybe", "yes"))
SEVERAL = Labels("multi_label_classification", 3, ("no", "maybe", "yes"))


@pytest.mark.parametrize(
    ("labels", "value", "expected", "dtype"),
    [
        (SINGLE, 2, 2, np.int32),
        (SINGLE, "maybe", 1, np.int32),
        (SEVERAL, ["yes", 0], [1, 0, 1], np.float32),
        (SEVERAL, [], [0, 0, 0], np.float32),
        (SEVERAL, [True, False, True], [1, 0, 1], np.float32),
        (SEVERAL, [0.5, 0.0, 1.0], [0.5, 0, 1], np.float32),
        (Labels("regression", 1), 3, 3, np.float32),
        (Labels("regression", 1), -0.5, -0.5, np.float32),
        (Labels("regression", 2), [1.5, 2], [1.5, 2], np.float32),
        # Cells of CSV.
        (Labels("regression", 1), "-0.5", -0.5, np.float32),
        (Labels("regression", 2), "[1.5, 2]", [1.5, 2], np.float32),
        (Labels("single_label_classification", 2), "1", 1, np.int32),
    ],
)
def test_labels(labels, value, expected, dtype):
    actual = labels(value)
    assert actual.dtype == dtype
    assert actual.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "value", "message"),
    [
        (SINGLE, 3, "expected a class, 0 to 2, found '3'"),
        (SINGLE, -100, "expected a class"),
        (SINGLE, 1.5, "expected a class"),
        (SINGLE, 3.0, "expected a class, 0 to 2, found '3'"),
        (SINGLE, True, "expected a class"),
        (SINGLE, "Yes", "'Yes' is none of no, maybe, yes"),
        (Labels("single_label_classification", 2), "yes", "list the classes in label_names"),
        (SEVERAL, "yes", "expected a list"),
        (SEVERAL, [0, 1, 1], "lists a class twice"),
        (SEVERAL, [0.0, 1.0], "expected 3 numbers"),
        (SEVERAL, [0.0, 1.0, 2.0], "from 0 to 1"),
        (Labels("regression", 1), "one", "expected a number"),
        (Labels("regression", 2), 1.0, "expected 2 numbers"),
        (Labels("regression", 1), None, "expected a number"),
    ],
)
def test_wrong_labels(labels, value, message):
    with pytest.raises(DataError, match=message):
        labels(value)


def test_problem_type_of_a_model():
    def of(count: int, problem: str | None, names: tuple[str, ...] = ()) -> Labels:
        info = ModelInfo(
            kind="classification", vocab_size=9, num_labels=count, problem_type=problem
        )
        return labels_of(info, names)

    assert of(1, None).problem_type == "regression"
    assert of(2, None, ("a", "b")).problem_type == "single_label_classification"
    assert of(2, "multi_label_classification").problem_type == "multi_label_classification"
    with pytest.raises(ConfigError, match="3 names, but the model has 2 classes"):
        of(2, None, ("a", "b", "c"))
    with pytest.raises(ConfigError, match="a regression has no classes"):
        of(1, None, ("a",))


def test_rows():
    encode = ClassificationFormat(byte_tokenizer(), "text", "label", SINGLE)
    example = encode({"text": "ab", "label": "yes"})
    assert example.input_ids.tolist() == [97, 98]
    assert (example.labels.tolist(), example.labels.shape) == (2, ())
    with pytest.raises(DataError, match="text: empty"):
        encode({"text": "", "label": 0})
    with pytest.raises(DataError, match="label: 'x' is none of"):
        encode({"text": "a", "label": "x"})
    with pytest.raises(DataError, match="label: no such field; the row has text"):
        encode({"text": "a"})
