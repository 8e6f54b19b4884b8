"""Runs of lm-evaluation-harness on the tasks of tests/data/lm_eval, for us and for its own backend.

Imported by the script that records the reference, where JAX is not installed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import paths

FOLDER = paths.DATA / "lm_eval"
REFERENCE = FOLDER / "reference.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One evaluation of one task."""

    model: str
    task: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `simple_evaluate`."""

    @property
    def name(self) -> str:
        return "-".join([self.model, self.task.removeprefix("local_"), *map(str, self.arguments)])


CHAT = {"apply_chat_template": True}
RUNS = [
    *(Run("llama", f"local_{task}") for task in ("choice", "rolling", "answer")),
    Run("llama", "local_prefilled", CHAT),
    *(Run("t5", f"local_{task}") for task in ("choice", "rolling")),
    # transformers counts the tokens of the encoder's input into an encoder-decoder's max_gen_toks.
    Run("t5", "local_answer", {"gen_kwargs": {"max_length": 13}}),
    Run("smollm2", "local_choice", {"num_fewshot": 1}),
    *(Run("smollm2", f"local_{task}") for task in ("rolling", "answer")),
    Run("smollm2", "local_answer", CHAT),
    Run("smollm2", "local_prefilled", {**CHAT, "num_fewshot": 1}),
]


def responses(results: dict[str, Any], task: str) -> dict[str, Any]:
    """What is compared: each document's prompt and answers, and the metrics."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    metrics = results["results"][task]
    return {
        "prompts": [sample["prompt_hash"] for sample in samples],
        "responses": [[answer for [answer] in sample["resps"]] for sample in samples],
        "metrics": {
            name: value
            for name, value in metrics.items()
            if name.endswith(",none") and isinstance(value, int | float)
        },
    }


def write_model(name: str, folder: Path) -> None:
    """Writes a model with its tokenizer as transformers reads it."""
    import tiny

    import jaxllm
    from jaxllm.checkpoint import smollm2

    folder.mkdir(parents=True)
    if name == "smollm2":
        jaxllm.save_hf(folder, *jaxllm.load(smollm2()))
        return
    fast = "smollm" if name == "llama" else "t5"
    spec = (paths.DATA / "tokenizers" / "fast" / f"{fast}.json").read_text(encoding="utf-8")
    ids = {token["content"]: token["id"] for token in json.loads(spec)["added_tokens"]}
    if name == "llama":
        template = json.loads((paths.DATA / "tokenizers" / "chat_templates.json").read_text())
        options = {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": template["smollm2"]["template"],
        }
        special = {
            "bos_token_id": ids["<|im_start|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|im_end|>"],
        }
        model = tiny.make("llama", vocab_size=420, **special)
    else:
        options = {
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "model_max_length": 48,
        }
        special = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
        # Tied: the backend calls tie_weights(), which ties every T5's head in transformers 5.
        model = tiny.make("t5", vocab_size=210, tie_word_embeddings=True, **special)
    options["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer.json").write_text(spec, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
    jaxllm.save_hf(folder, model)
