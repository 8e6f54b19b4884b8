"""Changed config.json, generation_config.json, adapter_config.json, recipes and rows of a batch:
each is read or raises a JaxLLMError, in time and little memory."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_runs
from fuzzing import fuzz_count, mutate, mutate_json, run_batch
from hub_configs import CONFIGS

GENERATION = {
    **{"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [2, 3]},
    **{"max_length": 64, "bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[5], -1.0]]},
    **{"exponential_decay_length_penalty": [5, 1.1], "stop_strings": ["x"], "num_beams": 3},
    **{"transformers_version": "4.57.6", "use_cache": False, "constraints": None},
}
ADAPTER = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"},
    **{"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "modules_to_save": None},
    **{"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"^v_proj$": 8}, "use_rslora": False},
    **{"base_model_name_or_path": "x", "inference_mode": True, "layers_to_transform": [0, 1]},
}
ROWS = [
    {"id": "a", "input_ids": [5, 6, 7], "max_new_tokens": 4, "temperature": 0.5, "do_sample": True},
    {"input_ids": [5, 6, 7], "seed": 3, "num_beams": 2, "eos_token_id": [3], "length_penalty": 2.0},
    {"messages": [{"role": "user", "content": "Hello"}], "stop_strings": ["x"]},  # no tokenizer
]


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def seeds(folder: Path) -> dict[str, list[bytes]]:
    recipes = [tiny_runs.plain(folder, family, lora={"rank": 2}) for family in ("llama", "t5")]
    return {
        "config": [*map(encoded, CONFIGS.values()), *map(encoded, tiny.CONFIGS.values())],
        "generation_config": [encoded(GENERATION)],
        "adapter_config": [encoded(ADAPTER)],
        "recipe": [*map(encoded, recipes)],  # JSON is YAML, too
        "rows": [*map(encoded, ROWS)],
    }


def check(count: int, folder: Path) -> None:
    rng, files = random.Random(count), []
    for name, originals in seeds(folder).items():
        for number in range(count):
            change = mutate_json if rng.random() < 0.8 else mutate
            files.append(folder / f"{number}.{name}")
            files[-1].write_bytes(change(rng.choice(originals), rng))
    outcomes = run_batch("fuzz_targets:by_suffix", files)
    bad = [o for o in outcomes if not o.harmless or o.grown_mib > 512 or len(o.detail) > 500]
    assert not bad, "\n".join(map(str, bad[:5]))
    for status in ("ok", "refused"):
        counts = Counter(outcome.path.suffix for outcome in outcomes if outcome.status == status)
        assert counts.keys() == {f".{name}" for name in seeds(folder)}
        assert min(counts.values()) > count / 20, (status, counts)


def test_some_settings(tmp_path: Path) -> None:
    check(fuzz_count(300), tmp_path)


@pytest.mark.slow
def test_many_settings(tmp_path: Path) -> None:
    check(fuzz_count(2000), tmp_path)
