"""Requests of OpenAI batch files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice
from jaxllm.batch.job.inputs.json_lines import JsonLines
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.common.errors import InputError, listed


class OpenAIRequests(JsonLines):
    """Lines with `custom_id`, `method`, `url` and `body`; a row's id is its `custom_id`."""

    def __init__(self, name: str, data: bytes, choice: ColumnChoice) -> None:
        if choice.named:
            flag = next(iter(choice.named))
            raise InputError(f"{flag}: {name} is an OpenAI batch file, with prompts in `body`")
        super().__init__(name, data, choice)

    def row(self, index: int) -> RawRow:
        row = super().row(index)
        custom_id = row.raw.get("custom_id") if isinstance(row.raw, Mapping) else None
        return RawRow(index, custom_id if isinstance(custom_id, str) else row.id, row.raw)

    def has_prompt(self, row: RawRow) -> bool:
        return isinstance(row.raw, Mapping) and "body" in row.raw

    def output_line(self, output: BatchOutput) -> dict[str, Any]:
        return output.to_dict()

    def remarks(self) -> list[str]:
        models: dict[str, None] = {}
        for index in range(len(self)):
            raw = self.row(index).raw
            body = raw.get("body") if isinstance(raw, Mapping) else None
            if isinstance(body, Mapping) and isinstance(body.get("model"), str):
                models[body["model"]] = None
        if not models:
            return []
        return [f"{self.name}: its requests name {listed(list(models))}; --model answers them"]
