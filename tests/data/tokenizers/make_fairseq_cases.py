"""Renews the cases of mBART, mBART-50, Pegasus, XGLM and NLLB in translation_cases.json.

Needs transformers==4.57.6 and sentencepiece; run it in this folder after make_translation_cases.py.
The ids are those of the slow classes, which split texts with sentencepiece itself. NLLB's puts its
mask before the languages: one of its folders is as the class saves it, one lists the added tokens
with the ids of the published model. Texts without special tokens are those of sentencepiece's
Decode.
"""

import base64
import json
import tempfile
from pathlib import Path

import sentencepiece
import transformers
from make_translation_cases import NLLB_CODES
from texts import TEXTS

HERE = Path(__file__).parent
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FILES = {
    "mbart": {"sentencepiece.bpe.model": "unigram"},
    "mbart50": {"sentencepiece.bpe.model": "unigram"},
    "pegasus": {"spiece.model": "pegasus"},
    "pegasus_offset": {"spiece.model": "pegasus"},
    "xglm_model": {"sentencepiece.bpe.model": "unigram"},
    "nllb_model": {"sentencepiece.bpe.model": "bpe"},
    "nllb_slow": {"sentencepiece.bpe.model": "bpe"},
}


def nllb_config(size: int) -> dict:
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    last = [*NLLB_CODES, "<mask>"]
    ids = {**dict(enumerate(first)), **{size + 1 + i: token for i, token in enumerate(last)}}
    decoder = {
        str(i): {**FLAGS, "content": token, "special": True, "lstrip": token == "<mask>"}
        for i, token in ids.items()
    }
    return {
        "tokenizer_class": "NllbTokenizer",
        "added_tokens_decoder": decoder,
        "additional_special_tokens": NLLB_CODES,
        "src_lang": "fra_Latn",
    }


def saved_by_the_slow_class(model: bytes) -> dict:
    """The tokenizer_config.json that NLLB's slow class saves."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentencepiece.bpe.model"
        file.write_bytes(model)
        codes = {"additional_special_tokens": NLLB_CODES, "src_lang": "fra_Latn"}
        transformers.NllbTokenizer(str(file), **codes).save_pretrained(folder)
        return json.loads((Path(folder) / "tokenizer_config.json").read_text())


def case(name: str, old: dict, model: bytes) -> dict:
    """The case `name` with ids of the slow class."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    config = nllb_config(len(processor)) if name == "nllb_model" else old["config"]
    config = saved_by_the_slow_class(model) if name == "nllb_slow" else config
    with tempfile.TemporaryDirectory() as folder:
        (file,) = FILES[name]
        (Path(folder) / file).write_bytes(model)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        kind = getattr(transformers, config["tokenizer_class"])
        tokenizer = kind.from_pretrained(folder)
    if old["languages"] and tokenizer.tgt_lang is None:
        tokenizer.tgt_lang = tokenizer.src_lang
    texts = TEXTS[::5] if name == "pegasus_offset" else TEXTS
    result = {**old, "files": FILES[name], "vocab": None, "json": None, "config": config}
    result["ids"] = {text: tokenizer(text).input_ids for text in texts}
    result["targets"] = {text: tokenizer(text_target=text).input_ids for text in texts[::2]}
    result["pair"] = [*texts[3:5], tokenizer(*texts[3:5]).input_ids]
    result["length"] = len(tokenizer)
    languages = [(source, target) for source, target, *_ in old["languages"]]
    result["languages"] = []
    for source, target in languages:
        tokenizer.src_lang, tokenizer.tgt_lang = source, target
        text = "Hello world."
        ids = (tokenizer(text).input_ids, tokenizer(text_target=text).input_ids)
        code = tokenizer.convert_tokens_to_ids(target)
        result["languages"].append([source, target, text, *ids, code])
    # The texts with special tokens are those of the published ids.
    rows = [] if name == "nllb_slow" else old["decoded"]
    result["decoded"] = [[row, shown, skipped(row, tokenizer, processor)] for row, shown, _ in rows]
    return result


def skipped(row: list[int], tokenizer, processor) -> str:
    """The text of a row without its special tokens."""
    own = [index for index in row if index not in tokenizer.all_special_ids]
    pieces = tokenizer.convert_ids_to_tokens(own)
    return processor.decode([processor.piece_to_id(piece) for piece in pieces])


def main() -> None:
    transformers.logging.set_verbosity_error()
    file = HERE / "translation_cases.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    cases = content["cases"]
    content["transformers_slow"] = transformers.__version__
    for name, files in FILES.items():
        (model,) = files.values()
        old = cases[name.removesuffix("_model").removesuffix("_slow")]
        cases[name] = case(name, old, base64.b64decode(content["models"][model]))
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
