"""Makes folder_cases_4.json or folder_cases_5.json: folders that transformers saved, with ids.

Needs transformers==4.57.6 or transformers==5.24.0, and sentencepiece; run it in this folder with
each. The folders are those of models whose checkpoint has both a tokenizer.model and a
tokenizer.json, as Phi-3, Llama 2 and TinyLlama, over the small model llama.model. The expected ids
are those of AutoTokenizer of 4.57.6, and of the tokenizer.json that 5.24.0 saved: 5.24.0 itself
loses `legacy` in saving, and then reads its file otherwise than it wrote it. For Llama 2 they are
also made of sentencepiece's own, a turn at a time, as Meta's code makes them.
"""

import io
import json
import shutil
import tempfile
from pathlib import Path

import sentencepiece
import tokenizers
import transformers
from texts import CORPUS, TEXTS
from transformers import AddedToken, AutoTokenizer

HERE = Path(__file__).parent
IS_4 = transformers.__version__.startswith("4.")
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TINY = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "The garden"}],
    [
        {"role": "user", "content": "Hello  there\nHow are you?"},
        {"role": "assistant", "content": "The water is cold. "},
        {"role": "user", "content": " 见 12\n"},
    ],
]
ROLES = ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
MASKS = ["No <mask> in", "<mask>", "a <mask>.", "a<mask> b  <mask>", "The <x> a", "<s>a </s> b"]
MORE = [
    "<|user|> The garden",
    "<|user|>The<|end|>\n\n<|assistant|>\n  The",
    "The <|end|> garden<|end|>garden",
    "<|end|>",
    "a<|user|>   ",
]


def start(folder: Path, model: bytes, config: dict):
    """A tokenizer of a folder with a tokenizer.model alone."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model)
    settings = {"tokenizer_class": "LlamaTokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(folder)


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def case(folder: Path, texts: list[str]) -> dict:
    """The files of a folder with the ids and texts of AutoTokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir())
        if path.name != "tokenizer.model"
    }
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [tokenizer(text).input_ids if IS_4 else library.encode(text).ids for text in texts]
    result = {
        "files": files,
        "has_model": (folder / "tokenizer.model").exists(),
        "ids": dict(zip(texts, rows, strict=True)),
        "length": len(tokenizer),
    }
    if tokenizer.chat_template:
        result["chats"] = []
        for chat in CHATS:
            options = {"add_generation_prompt": True, "tokenize": False}
            text = tokenizer.apply_chat_template(chat, **options)
            encode = tokenizer.encode if IS_4 else library.encode
            ids = encode(text, add_special_tokens=False)
            result["chats"].append([chat, ids if IS_4 else ids.ids])
    return result


def turns(model: bytes) -> list[list[int]]:
    """Llama 2's ids of CHATS by sentencepiece alone."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    bos, eos = processor.bos_id(), processor.eos_id()
    rows = []
    for chat in CHATS:
        row = []
        for message in chat:
            text = message["content"].strip()
            if message["role"] == "user":
                row += [bos, *processor.encode(f"[INST] {text} [/INST]")]
            else:
                # The space before an answer is the prefix that sentencepiece adds.
                row += [*processor.encode(f"{text} "), eos]
        rows.append(row)
    return rows


def cases_4(root: Path) -> dict:
    model = (HERE / "llama.model").read_bytes()
    result = {}
    # The published files of these models were written with `legacy`, their settings deny it.
    deny = {"legacy": False}
    for name, template in (("phi3", PHI), ("llama2", LLAMA2), ("tinyllama", TINY)):
        tokenizer = start(root / f"{name}-model", model, {"legacy": True})
        if name == "phi3":
            roles = [
                AddedToken(role, rstrip=True, normalized=False, special=True) for role in ROLES
            ]
            tokenizer.add_tokens(roles)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / name)
        edit(root / name / "tokenizer_config.json", lambda config: config.update(deny))
        result[name] = case(root / name, [*TEXTS, *MORE] if name == "phi3" else TEXTS)
    result["llama2"]["turns"] = turns(model)
    # Llama 1's special tokens are normalized.
    shutil.copytree(root / "llama2", root / "llama1")
    (root / "llama1" / "chat_template.jinja").unlink()

    def normalize(content: dict) -> None:
        entries = content.get("added_tokens") or content["added_tokens_decoder"].values()
        for token in entries:
            token["normalized"] = True

    for file in ("tokenizer.json", "tokenizer_config.json"):
        edit(root / "llama1" / file, normalize)
    result["llama1"] = case(root / "llama1", TEXTS[::3])
    tokenizer = AutoTokenizer.from_pretrained(root / "llama1")
    result["llama1"]["skipped"] = [
        [ids, tokenizer.decode(ids, skip_special_tokens=True)]
        for ids in result["llama1"]["ids"].values()
    ]
    result["masks"] = masks(root)
    return result


def masks(root: Path) -> list:
    """The ids of BART's and RoBERTa's slow classes of vocab.json and merges.txt, with and without
    flags of the mask in a file."""
    model = json.loads((HERE / "fast" / "gpt2.json").read_text(encoding="utf-8"))["model"]
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    result = []
    for name in ("BartTokenizer", "RobertaTokenizer"):
        for mask in (None, "<mask>", {"content": "<mask>", **flags}, {"content": "<x>", **flags}):
            folder = root / f"{name}{len(result)}"
            folder.mkdir()
            (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
            (folder / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
            config = {"tokenizer_class": name}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            named = {} if mask is None else {"mask_token": mask}
            (folder / "special_tokens_map.json").write_text(json.dumps(named))
            tokenizer = getattr(transformers, name).from_pretrained(folder)
            ids = {text: tokenizer(text).input_ids for text in MASKS}
            result.append([config, named, ids])
    return result


def cases_5(root: Path) -> dict:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=file,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=["\n", "▁▁", "▁▁▁", "<table>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    model = file.getvalue()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    start(root / "pieces-model", model, {"legacy": True}).save_pretrained(root / "pieces")
    result = {"pieces": case(root / "pieces", TEXTS)}
    rows = map(processor.encode, TEXTS)
    result["pieces"]["skipped"] = [[ids, processor.decode(ids)] for ids in rows]
    # What stays of Llama 2 when this version saves it.
    small = (HERE / "llama.model").read_bytes()
    tokenizer = start(root / "llama2-model", small, {"legacy": True})
    tokenizer.chat_template = LLAMA2
    tokenizer.save_pretrained(root / "llama2")
    result["llama2"] = case(root / "llama2", TEXTS)
    result["llama2"]["turns"] = turns(small)
    return result


def main() -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        content = (cases_4 if IS_4 else cases_5)(Path(name))
    text = json.dumps({"transformers": transformers.__version__, **content}, ensure_ascii=False)
    file = HERE / f"folder_cases_{4 if IS_4 else 5}.json"
    file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
