"""Makes gguf_vocabularies_{4,5}.json: vocabularies that llama.cpp's converter wrote, with ids and
texts.

Needs transformers==4.57.6 with torch, sentencepiece and gguf; then transformers==5.24.0 with
mistral-common==1.13.1 too. Run it in this folder with the paths of llama.cpp's source (that of
llama-cpp-python 0.3.36) and of a program that tokenizes with it:

    python make_gguf_vocabularies.py LLAMA_CPP_FOLDER TOKENIZE

``TOKENIZE FILE`` reads lines "AP HEX" (add special tokens, parse them, text in hexadecimal), and
writes a line with the ids that end a text, then for each text, with tabs between them: ids, their
text in hexadecimal without special tokens, and with them.

The converter knows byte-level vocabularies by the ids of a long text, which small ones do not have:
its answer is given here.
"""

import base64
import io
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
import transformers
from texts import CORPUS, TEXTS, random_texts
from transformers import AddedToken, AutoTokenizer

HERE = Path(__file__).parent
SOURCE, TOKENIZE = Path(sys.argv[1]), sys.argv[2]
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
from conversion.base import TextModel  # noqa: E402
from gguf import GGUFReader  # noqa: E402

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = "A0\t20\n9\t20\nA\t20\nFB01\t66 69\n2460\t31\n"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
T5_SIZES = {
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}
GEMMA_SYMBOLS = ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<table>", "<start_of_turn>", "<end_of_turn>"]
MORE = [
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nHello  there<end_of_turn>\n<start_of_turn>model\n",
    "</s>\n<|assistant|>\nHello",
    '<tool_call>{"x": 1}</tool_call>  <two words>a<two words> b',
    "a  b   c    d     e",
    "<table>\n\n\n  x</table>",
    "Hello<tool_call> <tool_call>there",
]


def train(**options) -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=file,
        vocab_size=options.pop("vocab_size", 420),
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        character_coverage=0.99,
        **options,
    )
    return file.getvalue()


def gemma() -> bytes:
    return train(
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=GEMMA_SYMBOLS,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>"},
        **{"eos_piece": "<eos>", "bos_piece": "<bos>"},
    )


def unigram(folder: Path, sentinels: str | None = None) -> bytes:
    (folder / "rules.tsv").write_text(RULES)
    symbols = [] if sentinels is None else [f"{sentinels}<extra_id_{n}>" for n in range(10)]
    return train(
        model_type="unigram",
        vocab_size=220,
        normalization_rule_tsv=str(folder / "rules.tsv"),
        user_defined_symbols=symbols,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )


def tekken() -> tuple[int, dict]:
    """The size of a vocabulary, and a tekken.json of single bytes and of merges of the corpus."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = {f" {word}".encode() for text in CORPUS for word in text.split()}
    for length in range(2, 9):  # each token is made of a shorter one and a byte
        longer = {word[:length] for word in words if word[: length - 1] in tokens}
        tokens += sorted(longer - set(tokens))[:30]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
    special += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>"]
    special += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[PREFIX]", "[MIDDLE]"]
    special += ["[SUFFIX]", *(f"<SPECIAL_{n}>" for n in range(17, 20))]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v7",
    }
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    marks = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(special)]
    size = config["default_vocab_size"]
    return size, {"config": config, "vocab": vocabulary, "special_tokens": marks}


def folder_of(root: Path, name: str) -> Path:
    """The Hugging Face folder of one of the models, as transformers saves it."""
    folder, first = root / name, root / f"{name}-first"
    first.mkdir()
    llama = (HERE / "llama.model").read_bytes()
    config = getattr(transformers, MODELS[name][0])
    special = {"special": True, "normalized": False}
    if name.startswith("llama"):
        (first / "tokenizer.model").write_bytes(llama)
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True}
        (first / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = AutoTokenizer.from_pretrained(first)
        if name == "llama_added":
            tokenizer.add_tokens([AddedToken(t, **special) for t in ("<|im_start|>", "<|im_end|>")])
            plain = ("<tool_call>", "</tool_call>", "<two words>")
            tokenizer.add_tokens([AddedToken(t, normalized=False) for t in plain])
            tokenizer.eos_token = "<|im_end|>"
        tokenizer.save_pretrained(folder)
        if name == "llama_json":  # as transformers 5 saves it
            (folder / "tokenizer.model").unlink(missing_ok=True)
        size = len(tokenizer) if name == "llama_json" else 448
        config(vocab_size=size, **SIZES).save_pretrained(folder)
    elif name.startswith("gemma"):
        (first / "tokenizer.model").write_bytes(gemma())
        tokenizer = transformers.GemmaTokenizer(str(first / "tokenizer.model"))
        marks = ["<start_of_turn>", "<end_of_turn>"]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        plain = [AddedToken(t, normalized=False) for t in GEMMA_SYMBOLS[:-2]]
        tokenizer.add_tokens(plain)
        tokenizer.save_pretrained(folder)
        own = {"head_dim": 16} | ({"sliding_window": 8} if name == "gemma3" else {})
        config(vocab_size=448, **SIZES, **own).save_pretrained(folder)
    elif "t5" in name:
        model = unigram(root, {"t5": None, "t5_saved": None, "mt5": "▁", "umt5": ""}[name])
        (first / "spiece.model").write_bytes(model)
        extra = {"extra_ids": 100 if name.startswith("t5") else 0}
        tokenizer = transformers.T5Tokenizer(str(first / "spiece.model"), legacy=True, **extra)
        if name == "t5":
            folder.mkdir()
            (folder / "spiece.model").write_bytes(model)
        else:  # with added_tokens.json
            tokenizer.save_pretrained(folder)
        config(vocab_size=384, **T5_SIZES).save_pretrained(folder)
    elif name == "tekken_json":
        folder.mkdir()
        size, spec = tekken()
        (folder / "tekken.json").write_text(json.dumps(spec))
        config(vocab_size=size, **SIZES).save_pretrained(folder)
    else:
        fast, bos, eos = FAST.get(name, ("gpt2", "<|endoftext|>", "<|endoftext|>"))
        backend = tokenizers.Tokenizer.from_file(str(HERE / "fast" / f"{fast}.json"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        tokenizer.add_tokens([AddedToken("<|im_end|>", **special)])
        tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
        tokenizer.bos_token, tokenizer.eos_token = bos, eos
        tokenizer.save_pretrained(folder)
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if name == "gpt2" else SIZES
        config(vocab_size=len(tokenizer) + 3, **sizes).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["architectures"] = [MODELS[name][1]]
    content.setdefault("n_ctx", 64)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


# File of fast/, BOS and EOS.
FAST = {
    "llama3": ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "smollm": ("smollm", "<|im_start|>", "<|im_end|>"),
    "command-r": ("cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
}
# Class of the config, class of the model, the converter's name of a byte-level vocabulary.
MODELS_5 = {
    "llama_json": ("LlamaConfig", "LlamaForCausalLM", None),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", "llama-bpe"),
    "smollm": ("LlamaConfig", "LlamaForCausalLM", "smollm"),
    "command-r": ("CohereConfig", "CohereForCausalLM", "command-r"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "qwen2"),
    "tekken_json": ("MistralConfig", "MistralForCausalLM", "tekken"),
}
MODELS_4 = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", None),
    "llama_added": ("MistralConfig", "MistralForCausalLM", None),
    "llama_json": ("LlamaConfig", "LlamaForCausalLM", None),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", None),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", None),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", None),
    "t5": ("T5Config", "T5ForConditionalGeneration", None),
    "t5_saved": ("T5Config", "T5ForConditionalGeneration", None),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", None),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", None),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", "gpt-2"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "deepseek-r1-qwen"),
    "tekken": ("MistralConfig", "MistralForCausalLM", "tekken"),
}
VERSION = transformers.__version__.partition(".")[0]
MODELS = MODELS_4 if VERSION == "4" else MODELS_5


def convert(folder: Path, out: Path, name: str) -> None:
    """Runs the converter on a folder; writes the vocabulary alone."""
    pre = MODELS[name][2]
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    program = str(SOURCE / "convert_hf_to_gguf.py")
    sys.argv = [program, str(folder), "--vocab-only", "--outfile", str(out)]
    sys.argv += ["--model-name", f"small {name}"]
    runpy.run_path(program, run_name="__main__")


def metadata(file: Path) -> dict:
    """The fields of a GGUF file about its vocabulary; arrays of numbers as lists."""
    result = {}
    for key, field in GGUFReader(file).fields.items():
        if key.startswith("tokenizer.") or key == "general.name":
            value = field.contents()
            result[key] = value.tolist() if isinstance(value, np.ndarray) else value
    return result


def tokenize(file: Path, texts: list[str], *, add: bool) -> tuple[list[int], list, list, list]:
    """llama.cpp's ids that end a text, and for each text its ids and their two texts."""
    lines = "".join(f"{int(add)}1 {text.encode().hex()}\n" for text in texts)
    run = subprocess.run([TOKENIZE, file], input=lines, capture_output=True, text=True, check=True)
    first, *rest = run.stdout.splitlines()
    rows = [line.split("\t") for line in rest]
    ids = [[int(index) for index in row[0].split()] for row in rows]
    skipped, shown = (
        [bytes.fromhex(row[place]).decode("utf-8", "replace") for row in rows] for place in (1, 2)
    )
    return [int(index) for index in first.split()[1:]], ids, skipped, shown


def case(root: Path, name: str) -> dict:
    out = root / f"{name}.gguf"
    convert(folder_of(root, name), out, name)
    more = random_texts(40, seed=7) if VERSION == "4" else []
    texts = [text for text in [*TEXTS, *MORE, *more] if text]
    ends, ids, skipped, shown = tokenize(out, texts, add=True)
    return {
        "metadata": metadata(out),
        "ends": ends,
        "texts": texts,
        "ids": ids,
        "skipped": skipped,
        "shown": shown,
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        cases = {model: case(Path(name), model) for model in MODELS}
    content = {"transformers": transformers.__version__, "cases": cases}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / f"gguf_vocabularies_{VERSION}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
