"""Makes the small GGUF models of this folder with llama.cpp's converter, and models.json.

Needs transformers==4.57.6 with torch, sentencepiece and safetensors; run it in this folder with the
path of llama.cpp's source (that of llama-cpp-python 0.3.36):

    python make_gguf_models.py LLAMA_CPP_FOLDER

models.json has the SHA-256 of every tensor of the models before conversion, and their generation
settings. Query, key and value projections are fused; Qwen2's file is split.
"""

import hashlib
import json
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
TOKENIZERS = HERE.parent / "tokenizers"
SOURCE = Path(sys.argv[1])
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
from conversion.base import TextModel  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 424}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SETTINGS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
SETTINGS |= {"repetition_penalty": 1.1, "do_sample": True, "eos_token_id": [2, 7]}
MODELS = {
    "llama": (transformers.LlamaConfig(**SIZES, attention_bias=True), {}),
    "qwen2": (transformers.Qwen2Config(**SIZES), {"--split-max-tensors": "9"}),
    "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=4), {"--outtype": "q8_0"}),
}
UNFUSED = ("qwen3",)


def write_tokenizer(folder: Path, name: str) -> None:
    if name == "llama":
        (folder / "tokenizer.model").write_bytes((TOKENIZERS / "llama.model").read_bytes())
        config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": {}}
        ends = {"420": "<|im_end|>", "421": "<end_of_turn>"}
        flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config["added_tokens_decoder"] = {
            index: {"content": text, "special": True, **flags} for index, text in ends.items()
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return
    spec = (TOKENIZERS / "fast" / "gpt2.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(spec, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make(root: Path, name: str) -> dict:
    config, options = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    folder = root / name
    model.generation_config.update(**SETTINGS)
    model.save_pretrained(folder)
    write_tokenizer(folder, name)
    if name == "qwen3":  # an embedding model of sentence-transformers
        (folder / "1_Pooling").mkdir()
        pooling = {"pooling_mode_lasttoken": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "modules.json").write_text(
            json.dumps([{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.Pooling"}])
        )
    pre = "gpt-2"
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    program = str(SOURCE / "convert_hf_to_gguf.py")
    options = {"--outtype": "f32", "--outfile": str(HERE / f"{name}.gguf"), **options}
    sys.argv = [program, str(folder), *(x for pair in options.items() for x in pair)]
    sys.argv += [] if name in UNFUSED else ["--fuse-qkv"]
    runpy.run_path(program, run_name="__main__")
    return {
        key: hashlib.sha256(np.ascontiguousarray(tensor.numpy()).tobytes()).hexdigest()
        for key, tensor in model.state_dict().items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        tensors = {model: make(Path(name), model) for model in MODELS}
    content = {"transformers": transformers.__version__, "settings": SETTINGS, "tensors": tensors}
    (HERE / "models.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
