"""Selection of row keys and columns, from files that have others too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.batch.row_prompts import PROMPT_KEYS
from jaxllm.batch.row_reader import ROW_KEYS
from jaxllm.common.errors import DataError, listed
from jaxllm.generation.settings.config import FIELDS


def generation_keys() -> frozenset[str]:
    """Keys of a row that generates: prompts, `id`, `seed`, and all generation fields."""
    return ROW_KEYS | FIELDS.keys()


class MissingCellError(DataError):
    """A row has no value in a column that the job needs; `row_id` is its own id, or None."""

    def __init__(self, message: str, row_id: str | int | None) -> None:
        super().__init__(message)
        self.row_id = row_id


@dataclasses.dataclass(frozen=True)
class ColumnChoice:
    """Keys of a row that are read, and columns under other names.

    A table (CSV, Parquet, a data set) may have columns of other purposes, and so may any file for
    which a column is named; these are left out. Rows of other files are read whole, so that a
    misspelt field is an error.

    Attributes:
        keys: keys that the job reads.
        prompt: the column of the prompts: texts, lists of messages, or lists of token ids.
        completion: the column of the completions.
    """

    keys: frozenset[str] = dataclasses.field(default_factory=generation_keys)
    prompt: str | None = None
    completion: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """The columns that are named, by the option that names them."""
        columns = {"--prompt-column": self.prompt, "--completion-column": self.completion}
        return {flag: column for flag, column in columns.items() if column is not None}

    def selected(self, names: Iterable[str]) -> list[str]:
        """The columns that are read, of those that a table has.

        Raises:
            DataError: a named column is missing, or none has prompts.
        """
        names = list(names)
        for flag, name in self.named.items():
            if name not in names:
                raise DataError(f"{flag}: no column {name!r}; there are {listed(names)}")
        if self.prompt is None and not set(PROMPT_KEYS).intersection(names):
            raise DataError(
                f"no column is called {', '.join(PROMPT_KEYS)}; name the column of the prompts "
                f"with --prompt-column (columns: {listed(names)})"
            )
        return [name for name in names if self.reads(name)]

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a row that are read, under the names that they have in a row.

        Raises:
            MissingCellError: a named column is missing or empty.

        >>> ColumnChoice(prompt="question").apply({"question": "Why?", "topic": "sky"})
        {'prompt': 'Why?'}
        """
        chosen = {name: value for name, value in row.items() if self.reads(name)}
        if self.prompt is not None:
            self._check_cell(chosen, self.prompt, "prompts")
            prompt = chosen.pop(self.prompt)
            chosen[_prompt_key(prompt)] = prompt
        if self.completion is not None:
            self._check_cell(chosen, self.completion, "completions")
            chosen["completion"] = chosen.pop(self.completion)
        return chosen

    def _check_cell(self, row: Mapping[str, Any], column: str, values: str) -> None:
        if column not in row:
            raise MissingCellError(
                f"nothing in {column!r}, the column of the {values}", row.get("id")
            )

    def reads(self, name: str) -> bool:
        """True if a column is read."""
        if name in (self.prompt, self.completion):
            return True
        replaced = PROMPT_KEYS if self.prompt is not None else ()
        return name in self.keys and name not in replaced


def _prompt_key(prompt: object) -> str:
    """The key of a row under which such a prompt stands."""
    if not isinstance(prompt, list) or not prompt:
        return "prompt"
    return "messages" if isinstance(prompt[0], Mapping) else "input_ids"
