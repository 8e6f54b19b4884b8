"""Post-processor of a tokenizer.json: special tokens around one or two sequences.

Implemented here and not by the tokenizers library, because settings may replace the file's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.settings import TokenizerSettings


def choose_post_processor(
    spec: Mapping[str, Any], settings: TokenizerSettings
) -> dict[str, Any] | None:
    """Chooses the post-processor: the file's, unless the settings have flags for BOS and EOS."""
    flags = [settings.options.get("add_bos_token"), settings.options.get("add_eos_token")]
    if flags == [None, None]:
        return spec["post_processor"]
    ids = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    used: dict[str, dict[str, Any]] = {}

    def special(name: str, type_id: int) -> list[dict[str, Any]]:
        token = settings.named.get(f"{name}_token")
        if token is None or not settings.flag(f"add_{name}_token", False):
            return []
        text = token.content
        used[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
        return [{"SpecialToken": {"id": text, "type_id": type_id}}]

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*special("bos", type_id), middle, *special("eos", type_id)]

    single, pair = around("A", 0), [*around("A", 0), *around("B", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def read_template(
    processor: Mapping[str, Any] | None,
) -> tuple[list[str | list[int]], list[str | list[int]]]:
    """Reads the templates for one and two sequences: lists of ids, "A" and "B" for sequences."""
    steps = [] if processor is None else processor.get("processors", [processor])
    templates = [step for step in steps if step["type"] != "ByteLevel"]
    if not templates:
        return ["A"], ["A", "B"]
    if len(templates) > 1:
        raise TokenizerError(
            "tokenizer.json: post_processor: more than one of TemplateProcessing and "
            "RobertaProcessing"
        )
    if templates[0]["type"] == "RobertaProcessing":  # of CodeT5
        cls, sep = [templates[0]["cls"][1]], [templates[0]["sep"][1]]
        return [cls, "A", sep], [cls, "A", sep, sep, "B", sep]
    tokens = templates[0]["special_tokens"]

    def read(pieces: list[dict[str, Any]]) -> list[str | list[int]]:
        return [
            tokens[piece["SpecialToken"]["id"]]["ids"]
            if "SpecialToken" in piece
            else piece["Sequence"]["id"]
            for piece in pieces
        ]

    return read(templates[0]["single"]), read(templates[0]["pair"])
