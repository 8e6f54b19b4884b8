"""Format of classification and regression rows: a text and its class, classes or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.models.config_checks import is_float32_number
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.example import ClassificationExample
from jaxllm.training.data.formats import encode, get, int32
from jaxllm.training.data.rows import Row


@dataclass(frozen=True)
class ClassificationFormat:
    """Encodes a text and its label according to the model's `problem_type`."""

    tokenizer: Tokenizer
    field: str
    label: str
    labels: Labels

    def __call__(self, row: Row) -> ClassificationExample:
        ids = encode(self.tokenizer, get(row, self.field, str))
        if not ids:
            raise DataError(f"{self.field}: empty, and the tokenizer has no BOS to stand for it")
        if self.label not in row:
            raise DataError(f"{self.label}: no such field; the row has {', '.join(map(str, row))}")
        try:
            return ClassificationExample(int32(ids), self.labels(row[self.label]))
        except DataError as failure:
            raise DataError(f"{self.label}: {failure}") from None


@dataclass(frozen=True)
class Labels:
    """Converts the label of a row to an array.

    - `single_label_classification`: a class number, or a class name if there are names: int32 [].
    - `multi_label_classification`: a list of numbers or names (the others are 0), or one float or
      boolean for each class: float32 [C].
    - `regression`: a number, or a list of C numbers for C outputs: float32 [] or [C].

    >>> labels = Labels("multi_label_classification", 3, ("red", "green", "blue"))
    >>> labels(["blue", "red"]).tolist(), labels([0.0, 1.0, 0.5]).tolist()
    ([1.0, 0.0, 1.0], [0.0, 1.0, 0.5])
    """

    problem_type: str
    count: int
    names: tuple[str, ...] = ()

    def __call__(self, value: Any) -> Int32[np.ndarray, ""] | Float32[np.ndarray, "*C"]:
        match self.problem_type:
            case "single_label_classification":
                return np.asarray(self._number(value), np.int32)
            case "multi_label_classification":
                return self._several(value)
            case _:
                return self._numbers(value)

    def _number(self, value: Any) -> int:
        if isinstance(value, str):
            if not self.names:
                raise DataError(f"{value!r} is a name: list the classes in label_names")
            if value not in self.names:
                raise DataError(f"{value!r} is none of {', '.join(self.names)}")
            return self.names.index(value)
        if type(value) is not int or not 0 <= value < self.count:
            raise DataError(f"expected a class, 0 to {self.count - 1}, found {str(value)[:60]!r}")
        return value

    def _several(self, value: Any) -> Float32[np.ndarray, " C"]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise DataError(f"expected a list of classes, found {str(value)[:60]!r}")
        if value and all(type(item) in (float, bool) for item in value):
            if len(value) != self.count or not all(0 <= item <= 1 for item in value):
                raise DataError(f"expected {self.count} numbers from 0 to 1, found {list(value)}")
            return np.asarray(value, np.float32)
        numbers = [self._number(item) for item in value]
        if len(set(numbers)) != len(numbers):
            raise DataError(
                f"{list(value)} lists a class twice; one value for each class is written with "
                "floats or booleans"
            )
        result = np.zeros(self.count, np.float32)
        result[numbers] = 1.0
        return result

    def _numbers(self, value: Any) -> Float32[np.ndarray, "*C"]:
        values = (
            list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        )
        if len(values) != self.count or not all(map(is_float32_number, values)):
            expected = "a number" if self.count == 1 else f"{self.count} numbers"
            raise DataError(f"expected {expected}, found {str(value)[:60]!r}")
        return np.asarray(values if self.count > 1 else values[0], np.float32)


def problem_of(model: ModelInfo) -> str:
    """Problem type of a classifier; the default depends on its number of outputs.

    >>> problem_of(ModelInfo(kind="classification", vocab_size=9, num_labels=1))
    'regression'
    """
    if model.problem_type is not None:
        return model.problem_type
    return "regression" if model.num_labels == 1 else "single_label_classification"


def labels_of(model: ModelInfo, names: tuple[str, ...]) -> Labels:
    """Makes the label converter of a model.

    Raises:
        ConfigError: the number of names is not the model's number of classes.
    """
    problem = problem_of(model)
    if names and problem == "regression":
        raise ConfigError("label_names: a regression has no classes")
    if names and len(names) != model.num_labels:
        raise ConfigError(
            f"label_names: {len(names)} names, but the model has {model.num_labels} classes "
            "(num_labels)"
        )
    return Labels(problem, model.num_labels, names)
