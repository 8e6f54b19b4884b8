"""Make folders of embedding models and the vectors that sentence-transformers computes with them.

    python make_cases.py FILES_VERSION   # under an environment with sentence-transformers

Run it by hand, first under 2.7.0 with the argument "old", which writes the folders of `OLD`, then
under 5.7.0 with "new", which writes the others and computes all vectors (torch 2.13.0, transformers
5.24.0). `<family>/` is the model with its tokenizer; `<case>.json` has the files that
sentence-transformers wrote beside it (text, or base64 of weights), and the calls of `encode`.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as token_models

ROOT = Path(__file__).parent
WIDTH = 16
OLD = ("t5_gtr", "mistral_e5", "llama_two", "qwen3_weighted")
CORPUS = [
    "A cat sleeps on the mat.",
    "The Cat is asleep; taxes rise every year, and NOT only here.",
]
TEXTS = [
    "A cat sleeps.",
    "Taxes RISE every year, and not only here: the cat is asleep on a mat.",
    "Hi",
]
COMMON = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
SIZES = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
FAMILIES = {
    "t5": (transformers.T5Config, SIZES, ("", " </s>")),
    "qwen3": (transformers.Qwen3Config, COMMON, ("", " </s>")),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {**COMMON, "use_bidirectional_attention": True, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        ("<s> ", " </s>"),
    ),
    "llama": (transformers.LlamaConfig, COMMON, ("<s> ", "")),
    "mistral": (transformers.MistralConfig, {**COMMON, "sliding_window": 6}, ("<s> ", " </s>")),
}
IDENTITY = torch.nn.Identity()
PROMPTS = {"query": "Find: ", "document": "", "passage": "Text is "}


def dense(inputs, outputs, bias, activation):
    layer = models.Dense(inputs, outputs, bias=bias, activation_function=activation)
    for number, parameter in enumerate(layer.parameters()):
        torch.manual_seed(number + outputs)
        parameter.data.normal_(0, 0.5)
    return layer


def pooling(*modes, **options):
    named = {f"pooling_mode_{name}": True for name in modes}
    return models.Pooling(WIDTH, **{"pooling_mode_mean_tokens": False, **named}, **options)


ALL = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
ALL = (*ALL, "lasttoken")
# Case: the modules after the model, and options of its files.
CASES = {
    "t5_gtr": (
        lambda: [pooling("mean_tokens"), dense(16, 24, False, IDENTITY), models.Normalize()],
        {"max_seq_length": 9},
    ),
    "t5_lower": (
        lambda: [pooling("max_tokens", "mean_tokens"), dense(32, 8, True, torch.nn.Tanh())],
        {"do_lower_case": True},
    ),
    "qwen3_embedding": (
        lambda: [pooling("lasttoken"), models.Normalize()],
        {"prompts": PROMPTS, "default_prompt_name": None},
    ),
    "qwen3_weighted": (
        lambda: [pooling("weightedmean_tokens", include_prompt=False)],
        {"prompts": PROMPTS, "default_prompt_name": "query", "max_seq_length": 14},
    ),
    "gemma3_embedding": (
        lambda: [
            pooling("mean_tokens"),
            dense(16, 32, False, IDENTITY),
            dense(32, 16, False, IDENTITY),
            models.Normalize(),
        ],
        {"prompts": PROMPTS, "max_seq_length": 20},
    ),
    "gemma3_gelu": (
        lambda: [pooling("cls_token"), models.Normalize(), dense(16, 12, True, torch.nn.GELU())],
        {},
    ),
    "llama_all": (lambda: [pooling(*ALL)], {}),
    "llama_two": (
        lambda: [pooling("cls_token", "mean_sqrt_len_tokens")],
        {"max_seq_length": 10},
    ),
    "mistral_e5": (
        lambda: [pooling("lasttoken"), models.Normalize()],
        {"max_seq_length": 12, "prompts": PROMPTS},
    ),
    "mistral_sqrt": (
        lambda: [pooling("mean_sqrt_len_tokens", include_prompt=False)],
        {"prompts": PROMPTS, "default_prompt_name": "passage"},
    ),
}


def make_tokenizer(family, folder):
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "</s>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    before, after = FAMILIES[family][2]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{before}$A{after}", special_tokens=[("</s>", 1), ("<s>", 2)]
            ),
        ]
    )
    left = {"padding_side": "left"} if family in ("qwen3", "mistral") else {}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        model_max_length=20,
        **left,
    )
    fast.save_pretrained(folder)
    return len(fast)


def make_family(family):
    folder = ROOT / family
    shutil.rmtree(folder, ignore_errors=True)
    size = make_tokenizer(family, folder)
    config_class, fields, _ = FAMILIES[family]
    config = config_class(vocab_size=size, **fields)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 2, 1
    if family == "t5":
        model = transformers.T5EncoderModel(config)
    else:
        model = transformers.AutoModel.from_config(config)
    generator = torch.Generator().manual_seed(len(family))
    for _name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim > 1 else 0.2
        noise = torch.randn(parameter.shape, generator=generator) * scale
        ones = 1.0 if parameter.ndim == 1 and family != "gemma3" else 0.0
        parameter.data.copy_(noise + ones)
    model.half().save_pretrained(folder)


def save_case(case, folder):
    make_modules, options = CASES[case]
    modules = make_modules()
    source = ROOT / case.split("_")[0]
    first = {k: v for k, v in options.items() if k in ("max_seq_length", "do_lower_case")}
    transformer = models.Transformer(str(source), **first)
    rest = {k: v for k, v in options.items() if k not in first}
    library = SentenceTransformer(modules=[transformer, *modules], device="cpu", **rest)
    library.save(str(folder))


def read_files(folder, source):
    """The files of the folder that are not those of the model, and the changed ones."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_weight = path.suffix in (".bin", ".safetensors")
        if not path.is_file() or name.endswith(".md") or ("/" not in name and is_weight):
            continue
        if (source / name).exists() and (source / name).read_bytes() == path.read_bytes():
            continue
        content = path.read_bytes()
        files[name] = base64.b64encode(content).decode() if is_weight else content.decode()
    return files


def encode(case, files):
    family = case.split("_")[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shutil.copytree(ROOT / family, folder)
        write_files(folder, files)
        kwargs = {"dtype": torch.float32}
        library = SentenceTransformer(str(folder), device="cpu", model_kwargs=kwargs)
        prompts = json.loads(files.get("config_sentence_transformers.json", "{}")).get("prompts")
        calls = []
        for prompt in [{}, *({"prompt_name": name} for name in prompts or ()), {"prompt": "So: "}]:
            vectors = library.encode(TEXTS, batch_size=1, **prompt)
            calls.append({**prompt, "vectors": np.asarray(vectors, np.float64).tolist()})
        lengths = [len(library[0].preprocess([x])["input_ids"][0]) for x in TEXTS]
    return {"lengths": lengths, "calls": calls}


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        is_weight = name.endswith((".bin", ".safetensors"))
        (folder / name).write_bytes(base64.b64decode(content) if is_weight else content.encode())


def main(kind):
    if kind == "new":
        for family in FAMILIES:
            if not (ROOT / family).exists():
                make_family(family)
    elif not (ROOT / "t5").exists():
        for family in FAMILIES:
            make_family(family)
    for case in CASES:
        path = ROOT / f"{case}.json"
        if (case in OLD) == (kind == "old"):
            with tempfile.TemporaryDirectory() as name:
                save_case(case, Path(name) / "saved")
                files = read_files(Path(name) / "saved", ROOT / case.split("_")[0])
        else:
            files = json.loads(path.read_text())["files"] if path.exists() else None
        if files is None:
            continue
        content = {"texts": TEXTS, "files": files}
        if kind == "new":
            content |= encode(case, files)
        path.write_text(json.dumps(content, indent=1))
        print(case, sorted(files))


if __name__ == "__main__":
    main(sys.argv[1])
