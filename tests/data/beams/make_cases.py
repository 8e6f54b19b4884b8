"""Makes cases.json: group and constrained beam search by transformers 4.56, the last with both.

    python tests/data/beams/make_cases.py      # transformers==4.56.2, torch, CPU

Random settings over the models of tests/data/conformance; every case has an end token that the
free search comes across, so that pools fill and rows end at different times. Cases whose tokens
change under noise of 2e-5 on the weights are left out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

HERE = Path(__file__).parent
MODELS = HERE.parent / "conformance" / "models"


def load(name):
    kind = AutoModelForSeq2SeqLM if "t5" in name else AutoModelForCausalLM
    model = kind.from_pretrained(MODELS / name, attn_implementation="eager").float().eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    if "t5" in name:
        model.generation_config.decoder_start_token_id = 0
    return model


def run(model, ids, mask, fields):
    inputs = {"inputs": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    # Its cache has as many layers as T5's encoder, which need not be those of the decoder.
    inputs["use_cache"] = not model.config.is_encoder_decoder
    try:
        out = model.generate(**inputs, return_dict_in_generate=True, output_scores=True, **fields)
    except RuntimeError:  # transformers trips over its beam indices where constraints are not met
        return model.generate(**inputs, **fields).tolist(), None
    return out.sequences.tolist(), [float(x) for x in out.sequences_scores]


def shaken(model, seed):
    """The model with a little noise on its weights, and a way back."""
    generator = torch.Generator().manual_seed(seed)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2e-5 * torch.randn(p.shape, generator=generator))
    return kept


def restore(model, kept):
    with torch.no_grad():
        for p, old in zip(model.parameters(), kept, strict=True):
            p.copy_(old)


def prompt(rng, vocab, t5):
    lengths = [rng.randint(2, 8) for _ in range(2)]
    width = max(lengths)
    ids, mask = [], []
    for n in lengths:
        row = [rng.randrange(3, vocab - 1) for _ in range(n)]
        gap = [0] * (width - n)
        ids.append(row + gap if t5 else gap + row)
        mask.append([1] * n + gap if t5 else gap + [1] * n)
    return ids, mask


def settings(rng, kind, vocab):
    fields = {
        "do_sample": False,
        "max_new_tokens": rng.choice([8, 12]),
        "length_penalty": rng.choice([0.0, 1.0, -1.0, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
    }
    if kind == "group":
        groups, size = rng.choice([(2, 2), (3, 2), (2, 3), (3, 1)])
        fields |= {"num_beams": groups * size, "num_beam_groups": groups}
        fields |= {"diversity_penalty": rng.choice([0.4, 2.5])}
    else:
        fields |= {"num_beams": rng.choice([3, 5])}
        token = lambda: rng.randrange(3, vocab - 1)  # noqa: E731
        fields["force_words_ids"] = rng.choice(
            [
                [[token(), token(), token()]],
                [[token()], [token(), token()]],
                [[[token()], [token(), token()]], [token()]],
                [[token(), token()], [token(), token()]],
            ]
        )
    fields["num_return_sequences"] = rng.randint(1, fields["num_beams"])
    return fields


def main():
    rng, cases = random.Random(0), []
    for name in ("s_llama", "s_gpt2", "s_t5", "s_t5_gated"):
        model = load(name)
        vocab = model.config.vocab_size
        for kind in ("group", "constrained"):
            actual = 0
            while actual < 5:
                ids, mask = prompt(rng, vocab, "t5" in name)
                fields = settings(rng, kind, vocab)
                free, _ = run(model, ids, mask, fields)
                start = 1 if "t5" in name else len(ids[0])
                seen = [t for row in free for t in row[start:] if t > 2]
                fields["eos_token_id"] = rng.choice(seen)
                sequences, scores = run(model, ids, mask, fields)
                stable = True
                for seed in range(2):
                    kept = shaken(model, seed)
                    stable &= run(model, ids, mask, fields)[0] == sequences
                    restore(model, kept)
                if not stable:
                    continue
                actual += 1
                cases.append(
                    {
                        "id": f"{kind}-{name}-{actual}",
                        "kind": "generate",
                        "mode": kind,
                        "model": name,
                        "inputs": {"input_ids": ids, "attention_mask": mask},
                        "generate_kwargs": {**fields, "pad_token_id": 0},
                        "expected": {
                            "sequences": sequences,
                            **({} if scores is None else {"sequences_scores": scores}),
                        },
                    }
                )
    text = ",\n".join(json.dumps(case) for case in cases)
    version = json.dumps(f"transformers {transformers.__version__}")
    (HERE / "cases.json").write_text(f'{{"made_by": {version}, "cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
