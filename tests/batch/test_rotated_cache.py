"""Slots that all write one cache slot a step: the rows' results, and the programs of a TPU."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import tiny
from batch_tools import differences, uneven_rows

from jaxllm import BatchGenerator
from jaxllm.batch import slots
from jaxllm.cache.slot_cache import RotatedCache, SlotCache
from jaxllm.models.build_options import Options
from jaxllm.planning import lower


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"num_hidden_layers": 1, "sliding_window": 5}),
        (
            "t5",  # with a cache as on a TPU, whose heads have an axis of their own
            {
                "num_layers": 1,
                "num_decoder_layers": 1,
                "options": Options(attn_implementation="splash"),
            },
        ),
    ],
)
def test_rows_equal_rows_alone(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are refilled at many offsets, and the columns of most rows pass the last slot."""
    monkeypatch.setattr(slots, "writes_one_slot", lambda platform: True)
    model = tiny.make(family, **changes)
    rows = uneven_rows(16, prompts=8, new=8)
    name = "for_prompts" if family == "t5" else "rows_of"  # other prompts are read in chunks
    prompts: list[SlotCache] = []
    method = getattr(RotatedCache, name)

    def recorded(*args: Any) -> SlotCache:
        prompts.append(method(*args))
        return prompts[-1]

    monkeypatch.setattr(RotatedCache, name, recorded)
    outputs = BatchGenerator(model, slots=4).generate(rows)
    assert differences(model, rows, outputs)[0] == []
    assert prompts


@pytest.mark.parametrize(("platform", "scatters"), [("tpu", 0), ("cpu", 2)])
def test_a_tpu_writes_keys_and_values_with_a_slice(
    platform: str, scatters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scatter there copies the whole cache before and after the loop."""
    monkeypatch.setattr(slots, "platform_of_arrays", lambda tree: platform)
    target = importlib.import_module("jaxllm.planning.topology")
    monkeypatch.setattr(target, "platform_of", lambda device: platform)
    model = tiny.make("llama", num_hidden_layers=1)
    decode, _ = lower(model, "batch", prompt=20, new=12, slots=8)
    text = decode.lowered.as_text()
    shape = "x".join(map(str, model.init_cache(8, 32).layers[0].k.shape))
    scatter = r'"stablehlo.scatter".*?\}\) : \([^)]*\) -> tensor<(\w+)>'
    results = re.findall(scatter, text, re.DOTALL)
    assert results.count(f"{shape}xf32") == scatters
