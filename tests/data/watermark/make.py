"""Makes reference.npz and reference.json from transformers 5.23.0 and torch 2.13.0 on the CPU.

Run it where both are installed: python tests/data/watermark/make.py
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import WatermarkDetector
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkLogitsProcessor,
)

FOLDER = Path(__file__).parent
RNG = np.random.default_rng(0)
arrays: dict[str, np.ndarray] = {}
cases: dict[str, dict] = {"green": {}, "detector": {}, "synthid": {}}

GREEN = {
    "left": ({"vocab_size": 130}, 6),
    "left_options": (
        {"vocab_size": 131, "greenlist_ratio": 0.6, "bias": -1.5, "hashing_key": 2**40 + 77}
        | {"context_width": 3},
        6,
    ),
    "left_short": ({"vocab_size": 30, "context_width": 5}, 4),
    "left_large": ({"vocab_size": 5000, "hashing_key": 7}, 3),
    "self": ({"vocab_size": 130, "seeding_scheme": "selfhash"}, 6),
    "self_wide": (
        {"vocab_size": 300, "seeding_scheme": "selfhash", "context_width": 4}
        | {"hashing_key": 2**41 + 12345, "greenlist_ratio": 0.5},
        6,
    ),
}
for name, (init, length) in GREEN.items():
    ids = RNG.integers(0, init["vocab_size"], (4, length))
    scores = RNG.normal(size=(4, init["vocab_size"])).astype(np.float32) * 3
    processor = WatermarkLogitsProcessor(device="cpu", **init)
    got = processor(torch.tensor(ids), torch.tensor(scores)).numpy()
    cases["green"][name] = init
    arrays |= {f"{name}/ids": ids, f"{name}/scores": scores, f"{name}/green": got != scores}

DETECTOR = {
    "detect_left": ({}, False),
    "detect_unique": ({"context_width": 2, "greenlist_ratio": 0.4, "bias": 1.0}, True),
    "detect_self": ({"seeding_scheme": "selfhash", "context_width": 3}, False),
}
for name, (config, unique) in DETECTOR.items():
    full = {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 15485863}
    full |= {"seeding_scheme": "lefthash", "context_width": 1, **config}
    ids = RNG.integers(3, 12, (3, 40))
    ids[:, 0] = 1
    model = SimpleNamespace(bos_token_id=1, is_encoder_decoder=False, vocab_size=40)
    out = WatermarkDetector(model, "cpu", full, ignore_repeated_ngrams=unique)(
        torch.tensor(ids), return_dict=True
    )
    cases["detector"][name] = {"config": config, "unique": unique}
    arrays[f"{name}/ids"] = ids
    for field in ("num_tokens_scored", "num_green_tokens", "z_score", "p_value"):
        arrays[f"{name}/{field}"] = getattr(out, field)

SYNTHID = {
    "synthid": {"ngram_len": 3, "keys": [654, 400, 836, 123], "sampling_table_size": 2**16},
    "synthid_skip": {"ngram_len": 4, "keys": [2**62 + 3, -5, 17], "sampling_table_size": 1000}
    | {"sampling_table_seed": 2**40 + 9, "skip_first_ngram_calls": True},
    "synthid_forgets": {"ngram_len": 2, "keys": [9, 8, 7], "sampling_table_size": 2**24 - 3}
    | {"sampling_table_seed": 3, "context_history_size": 3},
    "synthid_debug": {"ngram_len": 2, "keys": [1, 2], "sampling_table_size": 64}
    | {"debug_mode": True},
}
for name, config in SYNTHID.items():
    init = {"sampling_table_seed": 0, "context_history_size": 1024, **config}
    prompt, new, vocab = 4, 14, 20
    ids = RNG.integers(0, 4, (2, prompt + new))  # few tokens: contexts come back
    scores = RNG.normal(size=(new, 2, vocab)).astype(np.float32) * 2
    scores[..., 7] = -np.inf
    processor = SynthIDTextWatermarkLogitsProcessor(device=torch.device("cpu"), **init)
    out = [
        processor(torch.tensor(ids[:, : prompt + step]), torch.tensor(scores[step])).numpy()
        for step in range(new)
    ]
    cases["synthid"][name] = {"init": init, "prompt": prompt}
    tokens = torch.tensor(ids)
    arrays |= {
        f"{name}/ids": ids,
        f"{name}/scores": scores,
        f"{name}/out": np.stack(out),
        f"{name}/g_values": processor.compute_g_values(tokens).numpy().astype(np.uint8),
        f"{name}/new_contexts": processor.compute_context_repetition_mask(tokens).numpy(),
        f"{name}/before_end": processor.compute_eos_token_mask(tokens, 3).numpy().astype(bool),
    }

arrays["permutation"] = torch.randperm(1000, generator=torch.Generator().manual_seed(2**33 + 5))
np.savez_compressed(FOLDER / "reference.npz", **arrays)
(FOLDER / "reference.json").write_text(json.dumps(cases, indent=1) + "\n")
