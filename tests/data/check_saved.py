"""Do the folders that save_hf writes load in transformers, and compute the same there?

    python tests/data/check_saved.py write FOLDER    # with jaxllm
    python tests/data/check_saved.py read FOLDER     # with torch and transformers, 4.57 or 5.x

`write` saves every model of tests/data/parity and a few of random weights, with their logits;
`read` prints one line a model, and exits with 1 where keys are missing or unexpected, or where the
logits differ without an entry in the tables of versions' differences below.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

OWN = {
    "own_llama": ("llama", {}),
    "own_llama_tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "own_llama_yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "own_mistral": ("mistral", {}),
    "own_qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "own_qwen3": ("qwen3", {"attention_bias": True}),
    "own_mixtral": ("mixtral", {}),
    "own_qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "own_phi3": ("phi3", {"tie_word_embeddings": True}),
    "own_gemma": ("gemma", {"attention_bias": True}),
    "own_gemma3": ("gemma3_text", {"attention_bias": True}),
    "own_cohere": ("cohere", {"attention_bias": True}),
    "own_t5gemma": ("t5gemma", {"tie_word_embeddings": False}),
    "own_gpt2": ("gpt2", {}),
    "own_opt": ("opt", {}),
    "own_opt_untied": ("opt", {"tie_word_embeddings": False, "do_layer_norm_before": False}),
    "own_gpt_neo": ("gpt_neo", {"tie_word_embeddings": False}),
    "own_gptj": ("gptj", {}),
    "own_bloom": ("bloom", {}),
    "own_t5": ("t5", {}),
    "own_t5_tied": ("t5", {"tie_word_embeddings": True}),
    "own_bart": ("bart", {}),
    "own_marian": ("marian", {"share_encoder_decoder_embeddings": False}),
    "own_mbart": ("mbart", {}),
    "own_m2m_100": ("m2m_100", {}),
    "own_pegasus": ("pegasus", {}),
    "own_xglm": ("xglm", {}),
    "own_umt5": ("t5", {"model_type": "umt5"}),
}
# Where the version computes otherwise, by its own design or fault: see parity/README.md.
OTHER_LOGITS = {
    "4": {
        "llama_dynamic_v5", "llama_linear_v5", "llama_llama3_v5", "llama_longrope_v5",
        "llama_yarn_v5", "llama_yarn_mscale", "llama_longrope_factor", "llama_untied",
        "sharded_bf16", "sharded_f32", "t5_flan_resaved", "t5_tied_unscaled",
        # It does not read rope_parameters of version 5, and reads hidden_act in place of
        # hidden_activation; the original folders differ by as much.
        "cohere_full", "gemma2_full", "gemma3_full", "gemma_cls_single", "gemma_full",
        "gemma_published", "phi3_cls_single", "qwen2_window",
    },
    "5": {"umt5", "own_umt5"},  # before 5.24
}  # fmt: skip
# What version 4 cannot read: it knows num_local_experts under another name.
REFUSED = {"4": {"qwen3_moe_normed"}, "5": set[str]()}
# Keys that version 4 reports although its own files lack them, too.
MISSING = {"4": {"t5_tied_unscaled": {"lm_head.weight"}}, "5": {}}


def inputs_of(config: dict) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(5, min(config["vocab_size"], 40), (2, 7))
    encoder_only = config["architectures"][0].endswith("EncoderModel")
    if config.get("is_encoder_decoder") and not encoder_only:
        return {"input_ids": ids, "decoder_input_ids": ids[:, ::-1].copy()}
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def write(folder: Path) -> None:
    import tiny
    from parity_data import ROOT, cases

    import jaxllm

    models = {n.replace("/", "_"): jaxllm.load(ROOT / n)[0] for n in cases() if n != "tables"}
    models |= {name: tiny.make(family, **changes) for name, (family, changes) in OWN.items()}
    for name, model in models.items():
        jaxllm.save_hf(folder / name, model)
        config = json.loads((folder / name / "config.json").read_text())
        out = model(**inputs_of(config))
        result = out.logits if hasattr(out, "logits") else out.last_hidden_state
        np.save(folder / name / "result.npy", np.asarray(result))
    print(len(models), "models written")


def read(folder: Path) -> int:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    major, failures = transformers.__version__.split(".")[0], 0
    for path in sorted(folder.iterdir()):
        if path.name in REFUSED[major]:
            print(f"-    {path.name}: not read by this version, nor is the original")
            continue
        config = json.loads((path / "config.json").read_text())
        name = config["architectures"][0]
        name = {"LlamaModel": "LlamaForCausalLM", "GPT2Model": "GPT2LMHeadModel"}.get(name, name)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        if "num_experts_per_tok" in config and major != "4":
            options["experts_implementation"] = "eager"  # torch's takes multiples of 4 only
        model, info = getattr(transformers, name).from_pretrained(
            path, output_loading_info=True, **options
        )
        missing = set(info["missing_keys"]) - MISSING[major].get(path.name, set())
        inputs = {k: torch.from_numpy(v) for k, v in inputs_of(config).items()}
        with torch.inference_mode():
            out = model.eval()(**inputs)
        result = out.logits if hasattr(out, "logits") else out.last_hidden_state
        distance = np.abs(result.numpy() - np.load(path / "result.npy")).max()
        known = path.name in OTHER_LOGITS[major]
        keys_fit = not missing and not info["unexpected_keys"] and not info["mismatched_keys"]
        fine = keys_fit and (known or distance < 1e-4 * result.std())
        failures += not fine
        print(
            f"{'ok  ' if fine else 'FAIL'} {path.name}: difference {distance:.1e}"
            + (" (as known of this version)" if known else "")
            + ("" if keys_fit else f" {info}")
        )
    print(f"transformers {transformers.__version__}: {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    task, target = sys.argv[1:]
    sys.exit(write(Path(target)) if task == "write" else read(Path(target)))
