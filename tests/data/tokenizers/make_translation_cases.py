"""Makes translation_cases.json: reference ids for the tokenizers of translation models.

Needs transformers==5.23.0 and sentencepiece; run it in this folder. The tokenizers are Marian's,
mBART's, mBART-50's, NLLB's, M2M100's, Pegasus's and XGLM's over three small sentencepiece models,
which the file holds in base64.
"""

import base64
import json
import tempfile
from pathlib import Path

import sentencepiece
import transformers
from texts import CORPUS, TEXTS
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

HERE = Path(__file__).parent
RULES = "A0\t20\n9\t20\nA\t20\nFF21\t41\nFB01\t66 69\n2460\t31\n"
MODELS = {
    "unigram": {"model_type": "unigram"},
    "target": {"model_type": "unigram", "seed_sentencepiece_size": 400},
    "bpe": {"model_type": "bpe"},
    "pegasus": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
NLLB_CODES = ["ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "zul_Latn"]
# mBART's class of this version has no normalizer, unlike its sentencepiece model.
PLAIN = [text for text in TEXTS if not set(text) & set("\t\n\u00a0\uff21\ufb01\u2460")]


def train(folder: Path) -> dict[str, bytes]:
    rules = folder / "rules.tsv"
    rules.write_text(RULES)
    models = {}
    for name, options in MODELS.items():
        corpus = CORPUS[10:] if name == "target" else CORPUS
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_prefix=str(folder / name),
            vocab_size=160,
            normalization_rule_tsv=str(rules),
            character_coverage=0.99,
            num_threads=1,
            minloglevel=2,
            **options,
        )
        models[name] = (folder / f"{name}.model").read_bytes()
    return models


def pieces(model: bytes) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]


def vocabularies(models: dict[str, bytes]) -> dict[str, dict[str, int]]:
    """The vocab.json of Marian and of M2M100, whose ids are not those of the pieces."""
    own, target = ([p for p, _ in pieces(models[name])[3:]] for name in ("unigram", "target"))
    marian = ["</s>", "<unk>", *reversed(dict.fromkeys([*target, *own])), ">>deu<<", "<pad>"]
    m2m_100 = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *(p for p, _ in reversed(pieces(models["bpe"])[3:])),
    ]
    listed = {"marian": marian, "m2m_100": m2m_100}
    return {name: {token: i for i, token in enumerate(tokens)} for name, tokens in listed.items()}


def charsmap(model: bytes) -> bytes:
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(model)
    return proto.normalizer_spec.precompiled_charsmap


def fast_files(models: dict[str, bytes], folder: Path) -> dict[str, str]:
    """The tokenizer.json of NLLB and of XGLM, made as on the Hub: this version reads no others."""
    from transformers.tokenization_utils_base import generate_merges

    first = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {p: i for i, p in enumerate([*first, *(p for p, _ in pieces(models["bpe"])[3:])])}
    merges = generate_merges(vocab)
    vocab |= {code: len(vocab) + i for i, code in enumerate([*NLLB_CODES, "<mask>"])}
    nllb = transformers.NllbTokenizer(
        vocab=vocab,
        merges=merges,
        _spm_precompiled_charsmap=charsmap(models["bpe"]),
        additional_special_tokens=NLLB_CODES,
    )
    words = [(f"<madeupword{i}>", 0.0) for i in range(7)]
    scored = [*((p, 0.0) for p in first), *pieces(models["unigram"])[3:], *words]
    map_of_unigram = charsmap(models["unigram"])
    xglm = transformers.XGLMTokenizer(vocab=scored, _spm_precompiled_charsmap=map_of_unigram)
    result = {}
    for name, tokenizer in (("nllb", nllb), ("xglm", xglm)):
        tokenizer.save_pretrained(folder / name)
        result[name] = (folder / name / "tokenizer.json").read_text(encoding="utf-8")
    return result


BPE_FILE = {"sentencepiece.bpe.model": "bpe"}
UNIGRAM_FILE = {"sentencepiece.bpe.model": "unigram"}
M2M100 = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
CODES = {"additional_special_tokens": NLLB_CODES}
# As on the Hub. This version does not take languages for special tokens that no file lists.
LISTED = {"tgt_lang": "de", "additional_special_tokens": M2M100}
# Class, files from models, settings, languages of sources and targets to try, texts.
WMT21 = {"language_codes": "wmt21", "tgt_lang": "de"}
WMT21 |= {"additional_special_tokens": [f"__{c}__" for c in FAIRSEQ_LANGUAGE_CODES["wmt21"]]}
CASES = {
    "marian": ("MarianTokenizer", {"source.spm": "unigram", "target.spm": "target"}, {}, [], TEXTS),
    "mbart": (
        "MBartTokenizer",
        UNIGRAM_FILE,
        {"tgt_lang": "ro_RO"},
        [("en_XX", "ro_RO"), ("fr_XX", "de_DE")],
        PLAIN,
    ),
    "mbart50": ("MBart50Tokenizer", UNIGRAM_FILE, {}, [("fr_XX", "sl_SI")], TEXTS),
    "nllb": (
        "NllbTokenizer",
        {},
        {**CODES, "src_lang": "fra_Latn"},
        [("deu_Latn", "zul_Latn")],
        TEXTS,
    ),
    "nllb_legacy": (
        "NllbTokenizer",
        {},
        {**CODES, "legacy_behaviour": True},
        [("deu_Latn", "eng_Latn")],
        TEXTS[::5],
    ),
    "m2m_100": ("M2M100Tokenizer", BPE_FILE, LISTED, [("fr", "zu")], TEXTS),
    "wmt21": (
        "M2M100Tokenizer",
        BPE_FILE,
        WMT21,
        [("is", "ha")],
        TEXTS[::5],
    ),
    "pegasus": ("PegasusTokenizer", {"spiece.model": "pegasus"}, {}, [], TEXTS),
    "pegasus_offset": (
        "PegasusTokenizer",
        {"spiece.model": "pegasus"},
        {"offset": 5},
        [],
        TEXTS[::5],
    ),
    "xglm": ("XGLMTokenizer", {}, {}, [], TEXTS),
}


def case(name: str, models: dict, vocabs: dict, fast: dict) -> dict:
    class_name, files, config, languages, texts = CASES[name]
    config = {"tokenizer_class": class_name, **config}
    with tempfile.TemporaryDirectory() as folder:
        for file, model in files.items():
            (Path(folder) / file).write_bytes(models[model])
        vocab = {"MarianTokenizer": "marian", "M2M100Tokenizer": "m2m_100"}.get(class_name)
        if vocab is not None:
            (Path(folder) / "vocab.json").write_text(json.dumps(vocabs[vocab]))
        json_file = {"NllbTokenizer": "nllb", "XGLMTokenizer": "xglm"}.get(class_name)
        if json_file is not None:
            (Path(folder) / "tokenizer.json").write_text(fast[json_file], encoding="utf-8")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = getattr(transformers, class_name).from_pretrained(folder)
    result = {"files": files, "vocab": vocab, "json": json_file, "config": config}
    result["ids"] = {text: tokenizer(text).input_ids for text in texts}
    result["targets"] = {text: tokenizer(text_target=text).input_ids for text in texts[::2]}
    result["pair"] = [*texts[3:5], tokenizer(*texts[3:5]).input_ids]
    result["length"] = len(tokenizer)
    result["languages"] = []
    for source, target in languages:
        tokenizer.src_lang, tokenizer.tgt_lang = source, target
        text = "Hello world."
        ids = (tokenizer(text).input_ids, tokenizer(text_target=text).input_ids)
        code = tokenizer.convert_tokens_to_ids(f"__{target}__" if "M2M" in class_name else target)
        result["languages"].append([source, target, text, *ids, code])
    rows = [ids for text, ids in list(result["ids"].items())[::3]]
    rows += [ids[1:4] + ids + ids[::-1] for ids in rows[::4]]
    result["decoded"] = [
        [row, tokenizer.decode(row), tokenizer.decode(row, skip_special_tokens=True)]
        for row in rows
    ]
    return result


def main() -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        models = train(Path(name))
        vocabs, fast = vocabularies(models), fast_files(models, Path(name))
    content = {
        "transformers": transformers.__version__,
        "models": {name: base64.b64encode(x).decode() for name, x in models.items()},
        "vocabularies": vocabs,
        "fast": {name: json.loads(text) for name, text in fast.items()},
        "cases": {name: case(name, models, vocabs, fast) for name in CASES},
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "translation_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
