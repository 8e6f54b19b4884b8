"""Makes small T5, mT5 and umT5 models that transformers 4 and 5 saved, with their logits.

    python make_cases.py               # with torch and transformers 4.57.6, then with 5.24.0
    python make_cases.py check FOLDER  # do the folders in FOLDER give the stored logits?

Whether the input of the LM head is scaled by d_model**-0.5 depends on the class, on the version of
transformers, and on `tie_word_embeddings` and `scale_decoder_outputs` of config.json. Each folder
is as the version's `save_pretrained` wrote it, and expected.npz holds the logits of the saved
model, loaded again by the same version. The names say type, head and major version, such as
`mt5_tied_v5`.

Version 5 ties every head unless the file has an own `lm_head.weight`, as published models have it.
So `own` means a folder in the format of version 4 with a head of its own, loaded and saved again.
Version 5 has two more cases: `unscaled` is tied although the loaded file, which had no head, said
`tie_word_embeddings` false; `nokey` is `own` without `scale_decoder_outputs`, as umT5 was saved
before 5.24.

`check` reads folders of the same names, such as `save_hf` writes of these models, and compares
their logits in the version that runs with those that the same version stored.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
MAJOR = transformers.__version__.split(".")[0]
CLASSES = {
    "t5": transformers.T5ForConditionalGeneration,
    "mt5": transformers.MT5ForConditionalGeneration,
    "umt5": transformers.UMT5ForConditionalGeneration,
}
CONFIG = {
    "vocab_size": 29,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
INPUTS = {
    "input_ids": np.array([[5, 9, 3, 17, 8, 1], [7, 28, 2, 11, 20, 1]]),
    "decoder_input_ids": np.array([[0, 4, 12, 26], [0, 19, 6, 15]]),
}


def load(kind: str, folder: Path):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return CLASSES[kind].from_pretrained(folder, **options).eval()


def logits(kind: str, folder: Path) -> np.ndarray:
    with torch.inference_mode():
        out = load(kind, folder)(**{name: torch.from_numpy(x) for name, x in INPUTS.items()})
    return out.logits.numpy()


def write_source(kind: str, head: str, folder: Path) -> None:
    """Writes a model of random weights in the format of version 4."""
    config = {"model_type": kind, **CONFIG, "tie_word_embeddings": head == "tied"}
    config["architectures"] = [CLASSES[kind].__name__]
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = CLASSES[kind](transformers.AutoConfig.from_pretrained(folder))
    weights = {}
    for name, x in model.state_dict().items():
        if name.endswith("embed_tokens.weight") or (
            name == "lm_head.weight" and head in ("tied", "unscaled")
        ):
            continue
        # Logits of a scaled head have a standard deviation above 1, too.
        size = 5.0 if name in ("shared.weight", "lm_head.weight") else 0.5
        weights[name] = torch.ones_like(x) if x.ndim == 1 else size * torch.randn(x.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make() -> None:
    heads = ("tied", "own") if MAJOR == "4" else ("tied", "own", "unscaled", "nokey")
    for kind in CLASSES:
        for head in heads:
            name = f"{kind}_{head}_v{MAJOR}"
            with tempfile.TemporaryDirectory() as source:
                write_source(kind, head, Path(source))
                load(kind, Path(source)).save_pretrained(HERE / name)
            (HERE / name / "generation_config.json").unlink()
            if head == "nokey":
                config = json.loads((HERE / name / "config.json").read_text())
                config.pop("scale_decoder_outputs", None)
                (HERE / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            expected = logits(kind, HERE / name)
            np.savez_compressed(HERE / name / "expected.npz", logits=expected, **INPUTS)
            config = json.loads((HERE / name / "config.json").read_text())
            keys = ("tie_word_embeddings", "scale_decoder_outputs", "transformers_version")
            has_head = "lm_head.weight" in load_file(HERE / name / "model.safetensors")
            print(name, [config.get(key) for key in keys], has_head, expected.std())


def check(root: Path) -> int:
    failures = 0
    for folder in sorted(HERE.glob(f"*_v{MAJOR}")):
        expected = np.load(folder / "expected.npz")["logits"]
        difference = np.abs(logits(folder.name.split("_")[0], root / folder.name) - expected).max()
        failures += difference > 1e-4
        print(f"{folder.name}: difference {difference:.1e}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[2])) if sys.argv[1:2] == ["check"] else make())
