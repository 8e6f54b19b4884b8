"""Writes cases.json: parameter trees, logits and sequences of transformers 4.57's Flax classes.

Needs transformers 4.57.6, the last release series with Flax classes, and Flax; run from the root of
the repository.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

clip = jnp.clip
jnp.clip = lambda x, low=None, high=None, **old: clip(  # T5 uses argument names that JAX dropped
    x, old.get("a_min", low), old.get("a_max", high)
)

import transformers  # noqa: E402
from flax.traverse_util import flatten_dict  # noqa: E402

REFERENCE = Path("tests/data/reference")
MODELS = {
    "tiny-gpt2": ["FlaxGPT2LMHeadModel", "FlaxGPT2Model"],
    "tiny-llama": ["FlaxLlamaForCausalLM", "FlaxLlamaModel"],
    "tiny-t5": ["FlaxT5ForConditionalGeneration", "FlaxT5EncoderModel"],
    "tiny-t5-v1_1": ["FlaxT5ForConditionalGeneration"],
    "../parity/opt_norm_last": ["FlaxOPTForCausalLM", "FlaxOPTModel"],
    "../parity/gpt_neo_published": ["FlaxGPTNeoForCausalLM", "FlaxGPTNeoModel"],
    "../parity/gptj_whole": ["FlaxGPTJForCausalLM"],
    "../parity/bloom_published": ["FlaxBloomForCausalLM", "FlaxBloomModel"],
}
IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


def weighted(x) -> float:
    """A sum that tells a transposed array from its original."""
    values = np.asarray(x, np.float64).ravel()
    return float(values @ np.cos(np.arange(values.size)))


def case(folder: str, name: str) -> dict:
    model = getattr(transformers, name).from_pretrained(REFERENCE / folder, from_pt=True)
    flat = flatten_dict(model.params)
    extra = {"decoder_input_ids": IDS[:, :4]} if "Conditional" in name else {}
    outputs = model(IDS, **extra)[0]
    result = {
        "folder": folder,
        "class": name,
        "tree": {"/".join(path): [list(x.shape), weighted(x)] for path, x in flat.items()},
        "last": np.asarray(outputs[:, -1, :32], np.float64).round(6).tolist(),
    }
    if hasattr(model, "generate") and ("LM" in name or "Conditional" in name):
        result["greedy"] = np.asarray(model.generate(IDS).sequences).tolist()
        beams = model.generate(IDS, num_beams=3, max_length=12)
        result["beams"] = np.asarray(beams.sequences).tolist()
    return result


if __name__ == "__main__":
    cases = [case(folder, name) for folder, names in MODELS.items() for name in names]
    text = json.dumps({"ids": IDS.tolist(), "cases": cases})
    Path(__file__).with_name("cases.json").write_text(text + "\n", encoding="utf-8")
