"""transformers on torch as a peer on a device: `python hf_device_worker.py`, for the cases of a
record, in an environment that has both."""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import serve
from record_cases import Case

transformers.logging.set_verbosity_error()
device = "cuda" if torch.cuda.is_available() else "cpu"
models: dict[str, Any] = {}
"""The model of the last case, by its shape."""


def model_of(case: Case) -> Any:
    if case.shape in models:
        return models[case.shape]
    models.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    fields = case.config()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = auto.from_config(config)  # with "sdpa" where the family has it
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    models[case.shape] = model.eval()
    return models[case.shape]


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def run(case: Case) -> dict[str, Any]:
    try:
        return prefill(case) if case.kind == "prefill" else decode(case)
    except Exception as error:  # such as too little memory, of which another case may need less
        models.clear()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def decode(case: Case) -> dict[str, Any]:
    """The time of all new tokens less that of half of them, as jaxllm is measured."""
    model, ids = model_of(case), random_ids(case)
    half, mask = case.new // 2 + 1, torch.ones_like(ids)

    def call(new: int) -> float:
        fields = {"do_sample": False, "num_beams": case.beams, "attention_mask": mask}
        return seconds_of(lambda: model.generate(ids, max_new_tokens=new, **fields))

    call(half)
    whole, part = call(case.new), call(half)
    seconds = (whole - part) / (case.new - half)
    return {
        "step_seconds": seconds,
        "tokens_per_second": case.rows / seconds,
        "whole_tokens_per_second": case.rows * case.new / whole,
    }


def prefill(case: Case) -> dict[str, Any]:
    model, ids = model_of(case), random_ids(case)

    def call() -> float:
        return seconds_of(lambda: model(ids, logits_to_keep=1, use_cache=True))

    call()
    seconds = min(call() for _ in range(3))
    tokens = case.rows * case.prompt / seconds
    return {
        "step_seconds": seconds,
        "tokens_per_second": tokens,
        "whole_tokens_per_second": None,
    }


def random_ids(case: Case) -> torch.Tensor:
    high, generator = case.config()["vocab_size"], torch.Generator().manual_seed(0)
    return torch.randint(3, high, (case.rows, case.prompt), generator=generator).to(device)


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
serve({"version": version}, run, Case)
