"""Makes the files of this folder: small random models, as llama.cpp's converter writes them.

    python make_families.py LLAMA_CPP BIN

LLAMA_CPP is the source of llama.cpp in llama-cpp-python 0.3.36, and BIN a folder with its programs
llama-gguf-split and llama-imatrix, built from this source. Needs transformers==5.24.0,
torch==2.13.0, sentencepiece==0.2.3 and tokenizers==0.23.3.

The converter knows a byte-level vocabulary by a hash of the ids of a text, which a small vocabulary
cannot have: its answer is replaced. All weights are float16 numbers, so that the files hold them
exactly. `reference.json` has digests of the tensors that transformers saved, and config.json;
`reference.npz` has transformers' logits of the last position. `other` has files that are no model,
and `split` the parts that llama-gguf-split makes of mistral.gguf.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
SPLIT, OTHER = HERE / "split", HERE / "other"
SOURCE, BIN = Path(sys.argv[1]), Path(sys.argv[2])
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
source, program, pre, *arguments = sys.argv[1:]
if pre:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv = [f"{source}/{program}", *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IDS = [3, 40, 41, 260, 7, 100, 42, 261]
TEXT = ["the cat sat on the mat and saw the other cat", "a model of the language", "12 34 a b c"]
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 296}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SMALL |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TIED = SMALL | {"tie_word_embeddings": True}
GEMMA = SMALL | {"bos_token_id": 2, "eos_token_id": 1, "sliding_window": 4}
GEMMA |= {"query_pre_attn_scalar": 8}
T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"num_decoder_layers": 2, "decoder_start_token_id": 0}
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>", "<|file_sep|>"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}

# name: (class, config, kind of vocabulary)
MODELS = {
    "llama3": (
        "LlamaForCausalLM",
        SMALL | {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "hidden_size": 24},
        "llama-bpe",
    ),
    "mistral": ("MistralForCausalLM", TIED | {"sliding_window": 4}, "spm"),
    "mixtral": ("MixtralForCausalLM", TIED | {"num_local_experts": 4}, "spm"),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        TIED
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"norm_topk_prob": True},
        "qwen2",
    ),
    "gemma": ("GemmaForCausalLM", SMALL | {"bos_token_id": 2, "eos_token_id": 1}, "gemma"),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"num_hidden_layers": 2}, "gemma"),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | {"num_hidden_layers": 6}, "gemma"),
    "command-r": ("CohereForCausalLM", SMALL | {"num_hidden_layers": 2}, "command-r"),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 296, "n_positions": 32, "n_ctx": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        | {"bos_token_id": 2, "eos_token_id": 2},
        "gpt-2",
    ),
    "t5": ("T5ForConditionalGeneration", T5, "t5"),
    "umt5": ("UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}, "t5"),
}


def main() -> None:
    reference, logits = {}, {}
    for made in (SPLIT, OTHER):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, config, vocabulary) in MODELS.items():
            path = Path(folder) / name
            model = save(path, kind, config, vocabulary)
            reference[name] = {
                "config": json.loads((path / "config.json").read_text()),
                "tensors": digests(path),
            }
            decoder = {"decoder_input_ids": torch.tensor([[0, *IDS[:-1]]])} if "t5" in name else {}
            with torch.no_grad():
                result = model(torch.tensor([IDS]), **decoder).logits[0, -1]
            logits[name] = result.numpy()
            convert(path, vocabulary, HERE / f"{name}.gguf")
        mistral = Path(folder) / "mistral"
        convert(mistral, "spm", OTHER / "vocabulary.gguf", "--vocab-only")
        adapter = save_adapter(Path(folder) / "adapter")
        run(
            *(sys.executable, "-c", CONVERT, SOURCE, "convert_lora_to_gguf.py", "", adapter),
            *("--base", mistral, "--outfile", OTHER / "adapter.gguf"),
        )
        (mistral / "text.txt").write_text("the cat sat on the mat and saw the other cat. " * 60)
        run(
            *(BIN / "llama-imatrix", "-m", HERE / "mistral.gguf", "-f", mistral / "text.txt"),
            *("-c", 32, "--chunks", 1, "-o", OTHER / "imatrix.gguf"),
        )
    run(
        *(BIN / "llama-gguf-split", "--split", "--split-max-tensors", 5),
        *("--no-tensor-first-split", HERE / "mistral.gguf", SPLIT / "mistral"),
    )
    text = json.dumps(
        {"transformers": transformers.__version__, "ids": IDS, "models": reference}, indent=1
    )
    (HERE / "reference.json").write_text(text + "\n")
    np.savez_compressed(HERE / "reference.npz", **logits)


def save(folder: Path, kind: str, config: dict, vocabulary: str):
    """A random model, saved with its tokenizer."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape) * 0.3
            if parameter.ndim == 1 and kind != "GPT2LMHeadModel":
                values += 1.0
            parameter.copy_(values.half().float())
    model.save_pretrained(folder)
    if vocabulary in ("spm", "gemma", "t5"):
        save_sentencepiece(folder, vocabulary)
    else:
        save_byte_level(folder, vocabulary)
    return model


def save_adapter(folder: Path) -> Path:
    """A LoRA adapter of `mistral`, as PEFT writes it."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.v_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(8, 2)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_sentencepiece(folder: Path, vocabulary: str) -> None:
    special = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
    options = {"model_type": "bpe", "vocab_size": 296, "byte_fallback": True, **special}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if vocabulary == "gemma":
        options |= {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
        options |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
        options |= {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"]}
        config = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
        config |= {"unk_token": "<unk>", "pad_token": "<pad>"}
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
        flags |= {"single_word": False}
        turns = {"4": "<start_of_turn>", "5": "<end_of_turn>"}  # after <unk>
        config["added_tokens_decoder"] = {i: {"content": x, **flags} for i, x in turns.items()}
    if vocabulary == "t5":
        options = {"model_type": "unigram", "vocab_size": 40, "hard_vocab_limit": False}
        options |= {"normalization_rule_name": "identity"}  # whose table is empty
        options |= {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        config = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
        config |= {"pad_token": "<pad>"}
    name = "spiece" if vocabulary == "t5" else "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20),
        model_prefix=str(folder / name),
        minloglevel=2,
        **options,
    )
    (folder / f"{name}.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_byte_level(folder: Path, pre: str) -> None:
    special = {
        "qwen2": QWEN_TOKENS,
        "llama-bpe": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        "command-r": ["<PAD>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"],
        "gpt-2": ["<|endoftext|>"],
    }[pre]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    names = {"bos_token": special[0], "eos_token": special[-1], "pad_token": special[0]}
    if pre == "qwen2":
        names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.add_special_tokens({"additional_special_tokens": special})
    wrapped.save_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the float32 values of each tensor; the experts of a layer are one tensor."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in sorted(load_file(file).items(), key=lambda item: number_key(item[0])):
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.{e}.", name), []).append(tensor)
    tensors = {name: torch.stack(x) if "{e}" in name else x[0] for name, x in stacks.items()}
    return {
        name: hashlib.sha256(x.float().contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, x in sorted(tensors.items())
    }


def number_key(name: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in name.split(".")]


def convert(folder: Path, vocabulary: str, path: Path, *options: str) -> None:
    pre = "" if vocabulary in ("spm", "gemma", "t5") else vocabulary
    program = "convert_hf_to_gguf.py"
    arguments = [SOURCE, program, pre, folder, "--outfile", path, "--outtype", "f16", *options]
    run(sys.executable, "-c", CONVERT, *arguments)


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
