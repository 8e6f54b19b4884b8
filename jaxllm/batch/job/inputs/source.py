"""`Source`: the rows of a job, one by one, from any kind of file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice, MissingCellError
from jaxllm.batch.row_prompts import PROMPT_KEYS
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.common.errors import DataError, JaxLLMError, listed, quoted, shortened

EXAMPLE = 'such as {"prompt": "Hello"} on each line'


class Source(ABC):
    """Rows of a job, by number from 0 on.

    Attributes:
        name: the file, for messages and the report.
        sha256: digest of the content.
        choice: the keys that are read.
        unit: what a row is in messages, "line" or "row".
    """

    unit = "line"

    def __init__(self, name: str, sha256: str, choice: ColumnChoice) -> None:
        self.name, self.sha256, self.choice = name, sha256, choice

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def number(self, index: int) -> int:
        """The number of a row's line (or row) in the file, from 1 on."""

    @abstractmethod
    def read(self, index: int) -> Mapping[str, Any]:
        """A row's keys and values.

        Raises:
            DataError: it is not a row.
        """

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a job's identity that is its input."""
        return {"input": self.sha256, "rows": len(self), **self.choice.named}

    def row(self, index: int) -> RawRow:
        """Row number `index`; in its place an error, if it cannot be read."""
        row_id: str | int = self.number(index)
        try:
            raw = self.read(index)
        except JaxLLMError as error:
            raw = error
            if isinstance(error, MissingCellError) and error.row_id is not None:
                row_id = error.row_id
        return RawRow(index, row_id, raw)

    def output_line(self, output: BatchOutput) -> dict[str, Any]:
        """The line of an output; an error begins with the number of its line in the input."""
        line = output.to_dict()
        if output.error is None:
            return line
        number = self.number(output.index)
        prefix = f"{self.unit} {number}:"
        error = output.error if output.error.startswith(prefix) else f"{prefix} {output.error}"
        return {**line, "error": error, self.unit: number}

    def unread_keys(self) -> list[str]:
        """Keys of the rows that are left out, in the order of the file."""
        return []

    def remarks(self) -> list[str]:
        """Remarks on the input for the user, one per line."""
        unread = self.unread_keys()
        return [f"{self.name}: these columns are not read: {listed(unread)}"] if unread else []

    def check_rows(self) -> None:
        """Checks the rows as a whole; a single wrong row becomes a record with an error.

        Raises:
            DataError: there are no rows, none of them has a prompt, or two have the same id.
        """
        if not len(self):
            raise DataError(f"{self.name}: has no rows")
        number_of_id: dict[str | int, int] = {}
        has_prompt = False
        for index in range(len(self)):
            row, number = self.row(index), self.number(index)
            has_prompt |= self.has_prompt(row)
            other_number = number_of_id.setdefault(row.row_id, number)
            if other_number != number:
                raise DataError(
                    f"{self.name}: {self.unit}s {other_number} and {number} have the same id, "
                    f"{quoted(row.row_id)} (one without an id has its number); give each its own"
                )
        if not has_prompt:
            raise self._no_prompt()

    def has_prompt(self, row: RawRow) -> bool:
        """True if a row has a prompt, right or wrong."""
        return isinstance(row.raw, Mapping) and bool(row.raw.keys() & PROMPT_KEYS)

    def _no_prompt(self) -> DataError:
        first = self.row(0).raw
        shown = (
            shortened(str(first), 200)
            if isinstance(first, JaxLLMError)
            else f"{self.unit} {self.number(0)} has {shortened(', '.join(first) or 'no keys')}"
        )
        return DataError(
            f"{self.name}: no {self.unit} has a prompt, messages or input_ids ({shown}); write "
            f"JSONL, {EXAMPLE}, or name the column of the prompts with --prompt-column"
        )
