"""The models of the benchmarks, in the formats of all peers.

    python benchmarks/models.py FOLDER [--ct2 PYTHON] [--llamacpp PYTHON]

`smollm2` is the bundled model; `gpt2` (124M) and `t5-small` are random ones of those shapes. Each
is a Hugging Face folder of float32 weights; ct2/NAME is what CTranslate2's converter makes of it,
gguf/smollm2-F32.gguf what llama.cpp makes of the bundled file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxllm
from jaxllm.checkpoint import smollm2
from jaxllm.models.gpt2 import GPT2Config, GPT2LMHeadModel
from jaxllm.models.t5 import T5Config, T5ForConditionalGeneration

NAMES = ("smollm2", "gpt2", "t5-small")
FORMATS = {"F32": 0, "Q4_0": 2, "Q8_0": 7}
"""llama.cpp's numbers of file types."""
TO_GGUF = """
import sys, ctypes, llama_cpp as llama
options = llama.llama_model_quantize_default_params()
options.ftype, options.nthread, options.allow_requantize = int(sys.argv[3]), 2, True
source, target = sys.argv[1].encode(), sys.argv[2].encode()
raise SystemExit(llama.llama_model_quantize(source, target, ctypes.byref(options)))
"""


def make_model(name: str, folder: Path) -> Path:
    """The model as a Hugging Face folder, the same float32 weights for every peer."""
    tokenizer = None
    if name == "smollm2":
        model, tokenizer = jaxllm.load(smollm2())
    elif name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(), rngs=nnx.Rngs(0))
    else:
        config = T5Config(decoder_start_token_id=0)
        model = T5ForConditionalGeneration(config, rngs=nnx.Rngs(0))
    jaxllm.save_hf(folder, model, tokenizer)
    if tokenizer is None:  # CTranslate2's converter reads the vocabulary from a tokenizer
        write_tokenizer(folder, model.config.vocab_size, unigram=name == "t5-small")
    return folder


def write_tokenizer(folder: Path, size: int, *, unigram: bool) -> None:
    """A tokenizer with `size` pieces, of which most are never used."""
    if unigram:
        pieces = ["<pad>", "</s>", "<unk>"] + [f"▁piece{i}" for i in range(size - 3)]
        tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=2))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        )
        config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [
            *alphabet,
            *(f"piece{i}" for i in range(len(alphabet), size - 1)),
            "<|endoftext|>",
        ]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ct2", metavar="PYTHON", help="environment with ctranslate2")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="environment with llama-cpp-python")
    args = parser.parse_args()
    for name in NAMES:
        make_model(name, args.folder / name)
        if args.ct2:
            converter = Path(args.ct2).with_name("ct2-transformers-converter")
            out = args.folder / "ct2" / name
            command = [converter, "--model", args.folder / name, "--output_dir", out, "--force"]
            subprocess.run(command, check=True)
    if args.llamacpp:
        (args.folder / "gguf").mkdir(exist_ok=True)
        for name, number in FORMATS.items():
            out = args.folder / "gguf" / f"smollm2-{name}.gguf"
            command = [args.llamacpp, "-c", TO_GGUF, smollm2(), out, str(number)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
