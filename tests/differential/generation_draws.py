"""Draws random combinations for each area of the generation comparison.

Every field is passed explicitly in all combinations of a program, so that one compilation serves
many calls: only values that jaxllm traces vary freely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from generation_cases import Combination
from generation_models import PAD, VOCAB

Likely = Callable[[str, list[list[int]]], list[int]]
"""Tokens that a model writes after some prompts, so that rules about them have an effect."""

DRAFTED = ("llama", "mistral", "qwen3", "gpt2", "t5")
CONSTRAINED = ("llama", "mistral", "gpt2", "t5")
DEEP = ("llama_deep", "llama_tied", "gpt2_deep", "mistral_deep")
CONTRASTIVE = ("llama", "mistral", "gpt2", "t5", "t5_relu")
SAMPLED = ("llama", "qwen3", "gpt2", "t5")
RECORDED = ("llama", "mistral", "gpt2", "t5", "t5_relu")
SCORED = ("llama", "gpt2", "t5")
BATCH = 3


def pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def prompts(rng: np.random.Generator, *, repeating: bool = False) -> list[list[int]]:
    """Rows of 3 to 14 tokens, of several lengths; `repeating` ones have phrases that recur."""
    lengths = rng.permutation([int(rng.integers(9, 15)), *rng.integers(3, 15, BATCH - 1)])
    rows = [rng.integers(3, VOCAB, n).tolist() for n in lengths]
    if repeating:
        rows = [np.resize(row[: max(2, len(row) // 2)], len(row)).tolist() for row in rows]
    return rows


def number(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 3)


def tokens(rng: np.random.Generator, likely: list[int], count: int) -> list[int]:
    """Different tokens, of which most are likely ones."""
    found: list[int] = []
    while len(found) < count:
        token = pick(rng, likely) if likely and rng.random() < 0.6 else int(rng.integers(3, VOCAB))
        if token not in (*found, PAD):
            found.append(token)
    return found


def common(
    rng: np.random.Generator, likely: list[int], *, full: bool, longest: int = 14
) -> dict[str, Any]:
    """Fields of every strategy. `full` adds those that change what other fields see."""
    eos = tokens(rng, likely, int(rng.integers(1, 3)))
    most = int(rng.integers(5, longest + 1))
    least = int(rng.integers(1, most)) if rng.random() < 0.6 else 1
    suppressed = [t for t in tokens(rng, likely, 2) if t not in eos]
    fields: dict[str, Any] = {
        "pad_token_id": PAD,
        "eos_token_id": eos,
        "max_new_tokens": most,
        "min_new_tokens": least,
        "repetition_penalty": number(rng, 0.8, 1.5),
        "no_repeat_ngram_size": int(rng.integers(0, 4)),
        "suppress_tokens": [PAD, *suppressed],
        "begin_suppress_tokens": tokens(rng, likely, 2),
        "bad_words_ids": [tokens(rng, likely, n) for n in (1, 2, 3)],
        "sequence_bias": [[tokens(rng, likely, n), number(rng, -3, 3)] for n in (1, 1, 2, 3)],
        "output_scores": True,
    }
    if full:
        fields |= {
            "encoder_repetition_penalty": number(rng, 0.8, 1.4),
            "encoder_no_repeat_ngram_size": int(rng.integers(0, 4)),
            "exponential_decay_length_penalty": [
                least + int(rng.integers(0, 5)),
                number(rng, 1, 1.3),
            ],
            "forced_eos_token_id": eos,
            "renormalize_logits": True,
        }
    return fields


def warpers(rng: np.random.Generator, *, mild: bool) -> dict[str, Any]:
    """Fields of sampling; `mild` ones leave enough candidates for all beams."""
    return {
        "do_sample": True,
        "temperature": number(rng, 0.6, 2.0),
        "top_k": int(rng.integers(25 if mild else 3, 90)),
        "top_p": number(rng, 0.97 if mild else 0.5, 1.0),
        "min_p": number(rng, 0.0, 0.0005 if mild else 0.1),
        "typical_p": number(rng, 0.97 if mild else 0.6, 0.999),
        "epsilon_cutoff": 0.0 if mild else number(rng, 0.0, 0.005),
        "eta_cutoff": 0.0 if mild else number(rng, 0.0, 0.005),
    }


def beams(rng: np.random.Generator, early_stopping: Any) -> dict[str, Any]:
    return {
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": number(rng, -1, 2),
        "early_stopping": early_stopping,
    }


def drafts(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """Greedy search with an assistant, with the model's first layer, or with looked up drafts;
    sampling with looked up drafts."""
    model = DRAFTED[number_of % len(DRAFTED)]
    kinds = {
        "llama": ("early exit", "lookup"),
        "mistral": ("assistant", "lookup, sampled"),
        "qwen3": ("assistant", "lookup"),
        "gpt2": ("assistant", "lookup, sampled"),
        "t5": ("assistant", "lookup"),
    }
    kind = pick(rng, kinds[model])
    rows = prompts(rng, repeating=True)
    fields = common(rng, likely(model, rows), full=kind == "lookup")
    draft, settings, area = None, {}, "drafts"
    if kind.startswith("lookup"):
        fields |= {
            "prompt_lookup_num_tokens": 4,
            "max_matching_ngram_size": int(rng.integers(1, 4)),
        }
        fields["repetition_penalty"] = number(rng, 0.7, 1.1)
        if kind == "lookup, sampled":
            fields |= warpers(rng, mild=False)
            area = "drafts, sampled"
    else:
        settings = {
            "num_assistant_tokens": 4,
            "num_assistant_tokens_schedule": pick(
                rng, ("constant", "heuristic", "heuristic_transient")
            ),
            "assistant_confidence_threshold": number(rng, 0, 0.4),
        }
        if kind == "early exit":
            fields["assistant_early_exit"] = 1
        else:
            draft = f"{model}_draft"
    return Combination(area, model, rows, fields, draft, settings, seed(rng))


def constraints(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """Beams with phrases that must occur, and choices among phrases."""
    model = CONSTRAINED[number_of % len(CONSTRAINED)]
    rows = prompts(rng)
    written = likely(model, rows)
    fields = common(rng, written, full=False) | beams(rng, bool(number_of // 4 % 2))
    fields["eos_token_id"] = fields["eos_token_id"][:1]
    forbidden = {*fields["suppress_tokens"], *fields["eos_token_id"]}
    forbidden |= {word[-1] for word in fields["bad_words_ids"]} | {*fields["begin_suppress_tokens"]}
    fields["no_repeat_ngram_size"] = int(rng.integers(3, 5))

    def phrase(length: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            found = [t for t in tokens(rng, written, length) if t not in forbidden]
        return found

    words: list[Any] = [phrase(int(rng.integers(1, 4)))]
    if rng.random() < 0.6:
        alternatives = [phrase(int(rng.integers(1, 4))) for _ in range(int(rng.integers(2, 4)))]
        if rng.random() < 0.5:  # alternatives that begin alike
            alternatives = [[alternatives[0][0], *phrase(1 + i)] for i in range(2)]
        if not any(a != b and b[: len(a)] == a for a in alternatives for b in alternatives):
            words.append([list(x) for x in dict.fromkeys(map(tuple, alternatives))])
    elif rng.random() < 0.4:
        words.append(phrase(2))
    fields["force_words_ids"] = words
    return Combination("constraints", model, rows, fields, seed=seed(rng))


def dola(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """DoLa, greedy and sampled. One layer for the batch: rows end together, or are one row, unless
    a single layer is named."""
    model = DEEP[number_of % len(DEEP)]
    layers = pick(rng, ("low", "high", [0, 2], [1]))
    rows = prompts(rng)
    fields = common(rng, likely(model, rows), full=model == "llama_deep")
    if layers != [1]:
        for name in ("exponential_decay_length_penalty", "forced_eos_token_id", "min_new_tokens"):
            fields.pop(name, None)
        fields["eos_token_id"] = None
    if model == "mistral_deep":
        fields |= warpers(rng, mild=False)
    # Only tokens of a tenth of the best one's probability are left, so few may be forbidden.
    fields |= {"suppress_tokens": [PAD], "no_repeat_ngram_size": pick(rng, (0, 3, 4))}
    fields["bad_words_ids"] = fields["bad_words_ids"][1:]
    fields["begin_suppress_tokens"] = [PAD]
    if "encoder_no_repeat_ngram_size" in fields:
        fields["encoder_no_repeat_ngram_size"] = 3
    fields["dola_layers"] = layers
    return Combination("DoLa", model, rows, fields, seed=seed(rng))


def contrastive(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """Contrastive search."""
    model = CONTRASTIVE[number_of % len(CONTRASTIVE)]
    rows = prompts(rng)
    full = bool(number_of // len(CONTRASTIVE) % 2)
    fields = common(rng, likely(model, rows), full=full)
    fields |= {"penalty_alpha": number(rng, 0.1, 0.9), "top_k": 4}
    return Combination("contrastive search", model, rows, fields, seed=seed(rng))


def sampled_beams(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """Beam sampling, with the same random draws on both sides."""
    model = SAMPLED[number_of % len(SAMPLED)]
    rows = prompts(rng)
    stopping = (False, True, "never")[number_of // len(SAMPLED) % 3]
    fields = common(rng, likely(model, rows), full=stopping == "never")
    fields.pop("forced_eos_token_id", None)  # one candidate for all beams
    fields |= beams(rng, stopping) | warpers(rng, mild=True)
    return Combination("sampled beams", model, rows, fields, seed=seed(rng))


def records(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """Hidden states and attentions of greedy search and beams."""
    model = RECORDED[number_of % len(RECORDED)]
    rows = prompts(rng)
    with_beams = bool(number_of // len(RECORDED) % 2)
    fields = common(rng, likely(model, rows), full=False, longest=10)
    if with_beams:
        fields |= beams(rng, False)
    fields |= {"output_hidden_states": True, "output_attentions": True}
    return Combination("hidden states and attentions", model, rows, fields, seed=seed(rng))


def transition_scores(rng: np.random.Generator, likely: Likely, number_of: int) -> Combination:
    """`compute_transition_scores` of greedy search, sampling and beams."""
    model = SCORED[number_of % len(SCORED)]
    rows = prompts(rng)
    kind = number_of // len(SCORED) % 3
    fields = common(rng, likely(model, rows), full=kind < 2)
    if kind == 1:
        fields |= warpers(rng, mild=False)
    if kind == 2:
        fields |= beams(rng, "never")
    return Combination("transition scores", model, rows, fields, seed=seed(rng))


def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


AREAS: dict[str, Callable[[np.random.Generator, Likely, int], Combination]] = {
    "drafts": drafts,
    "constraints": constraints,
    "dola": dola,
    "contrastive": contrastive,
    "sampled_beams": sampled_beams,
    "records": records,
    "transition_scores": transition_scores,
}


def draw(area: str, number_of: int, base_seed: int, likely: Likely) -> Combination:
    """Combination `number_of` of an area; it depends on these arguments alone."""
    rng = np.random.default_rng([base_seed, *area.encode(), number_of])
    return AREAS[area](rng, likely, number_of)
