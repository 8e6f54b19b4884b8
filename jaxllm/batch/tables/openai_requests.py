"""Requests of OpenAI batch files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.tables.columns import FAILED, ColumnChoice
from jaxllm.batch.tables.json_lines import JsonLines
from jaxllm.batch.tables.source import Source
from jaxllm.common.errors import InputError, JaxLLMError, listed


class OpenAIRequests(Source):
    """Lines with `custom_id`, `method`, `url` and `body`; a row's id is its `custom_id`."""

    def __init__(self, table: JsonLines, choice: ColumnChoice) -> None:
        for flag in choice.options:
            raise InputError(
                f"{flag}: {table.name} is an OpenAI batch file, with prompts in `body`"
            )
        self.table, self.choice, self.sha256 = table, choice, table.sha256()
        self.columns = ["id", "custom_id", "response", "error"]

    def row(self, index: int) -> RawRow:
        try:
            cells = self.table.cells(index)
            # A file of errors of an earlier job has these two keys as well.
            added = ("id", FAILED) if FAILED in cells else ()
            raw: Any = {key: cells[key] for key in cells if key not in added}
        except JaxLLMError as error:
            raw = error
        custom_id = raw.get("custom_id") if isinstance(raw, Mapping) else None
        row_id = custom_id if isinstance(custom_id, str) else self.number(index)
        return RawRow(index, row_id, raw)

    def has_prompt(self, row: RawRow) -> bool:
        return isinstance(row.raw, Mapping) and "body" in row.raw

    def result(self, output: BatchOutput) -> dict[str, Any]:
        return output.to_dict()

    def output_line(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        return dict(result)

    def arrow(self) -> dict[str, Any]:
        return {}

    def inputs(self, index: int) -> dict[str, Any]:
        raw = self.row(index).raw
        return dict(raw) if isinstance(raw, Mapping) else {}

    def remarks(self) -> list[str]:
        models: dict[str, None] = {}
        for index in range(len(self)):
            body = self.inputs(index).get("body")
            if isinstance(body, Mapping) and isinstance(body.get("model"), str):
                models[body["model"]] = None
        if not models:
            return []
        return [f"{self.name}: its requests name {listed(list(models))}; --model answers them"]
