"""Makes target_scores.json: log-probabilities of target texts by transformers' models.

Needs transformers==5.24.0, torch, sentencepiece and numpy; run it in this folder. The tokenizers
are those of tests/data/tokenizers/translation_cases.json. The weights are `random_weights` of the
shapes, which the file has.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))
import translation_tools  # noqa: E402

# Model class, tokenizer class, start of the decoder, languages of source and target.
FAMILIES = {
    "marian": ("MarianMTModel", "MarianTokenizer", "pad", None),
    "nllb": ("M2M100ForConditionalGeneration", "NllbTokenizer", "eos", ("deu_Latn", "zul_Latn")),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Tokenizer", "eos", ("fr", "zu")),
    "mbart": ("MBartForConditionalGeneration", "MBartTokenizer", None, ("fr_XX", "de_DE")),
    "mbart50": ("MBartForConditionalGeneration", "MBart50Tokenizer", "eos", ("fr_XX", "sl_SI")),
    "t5": ("T5ForConditionalGeneration", "T5Tokenizer", "pad", None),
}
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
SIZES |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
SIZES |= {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}
SIZES |= {"scale_embedding": False, "dropout": 0.0, "activation_function": "relu"}
T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
PAIRS = [("Hello world.", "Where is the station?"), ("Nice to meet you.", "Hello, hello!")]
MONO_T5 = [
    (f"Query: Hello Document: {text} Relevant:", answer)
    for text in ("Hello world.", "The garden is green.")
    for answer in ("true", "false")
]


def tokenizer_of(name: str, class_name: str, folder: Path):
    if name == "t5":
        source = HERE.parent / "tokenizers" / "t5.model"
        (folder / "spiece.model").write_bytes(source.read_bytes())
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        translation_tools.write(folder, name, tgt_lang=None)
    return getattr(transformers, class_name).from_pretrained(folder)


def case(name: str) -> dict:
    model_class, tokenizer_class, start, languages = FAMILIES[name]
    model_class = getattr(transformers, model_class)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(name, tokenizer_class, Path(folder))
    codes = dict(zip(("src_lang", "tgt_lang"), languages or (), strict=False))
    for field, code in codes.items():
        setattr(tokenizer, field, code)
    special = {f"{key}_token_id": getattr(tokenizer, f"{key}_token_id") for key in ("pad", "eos")}
    if name == "mbart":
        first = tokenizer.convert_tokens_to_ids(codes["tgt_lang"])
    else:
        first = special[f"{start}_token_id"]
    config = model_class.config_class(
        **(T5_SIZES if name == "t5" else SIZES),
        **special,
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=first,
        vocab_size=len(tokenizer),
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    kept = {k: v for k, v in model.state_dict().items() if "sinusoid" not in k}
    # Tied matrices are one tensor; T5's and BART's name is that of the shared embedding.
    owners = {
        v.data_ptr(): k for k, v in sorted(kept.items(), key=lambda item: "shared" in item[0])
    }
    shapes = {k: list(v.shape) for k, v in kept.items() if owners[v.data_ptr()] == k}
    if name in ("marian", "nllb", "m2m_100"):
        shapes = {k: s for k, s in shapes.items() if "embed_positions" not in k}
    scale = 1.6 if name == "t5" else 0.7
    weights = translation_tools.random_weights(shapes, scale)
    model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    model.tie_weights()
    # mBART's targets end in the end token and the code, those of others in the end token.
    added = 2 if name == "mbart" else 1
    pairs = MONO_T5 if name == "t5" else PAIRS
    rows = []
    for prompt, completion in pairs:
        batch = tokenizer(prompt, text_target=completion, return_tensors="pt")
        with torch.no_grad():
            logits = model(**batch).logits
        assert logits.std() > 1, (name, logits.std())
        labels = batch["labels"][0]
        log_probs = logits.log_softmax(-1)[0, range(len(labels)), labels][:-added]
        rows.append(
            {
                "prompt": prompt,
                "completion": completion,
                **codes,
                "ids": labels[:-added].tolist(),
                "token_log_probs": [round(float(x), 6) for x in log_probs],
            }
        )
    fields = json.loads(config.to_json_string())
    return {"config": fields, "shapes": shapes, "scale": scale, "rows": rows}


cases = {name: case(name) for name in FAMILIES}
data = {"transformers": transformers.__version__, "cases": cases}
(HERE / "target_scores.json").write_text(json.dumps(data, indent=1) + "\n")
