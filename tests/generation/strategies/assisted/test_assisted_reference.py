"""Assisted generation as transformers does it: its cases, and how often each calls the model."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import DATA, cases, compare, model

import jaxllm
from jaxllm.generation.processors import RepetitionPenaltyLogitsProcessor


def assisted_cases() -> list[dict]:
    modes = ("assisted", "prompt_lookup", "early_exit")
    return [case for case in cases().values() if case["mode"] in modes]


def arguments(case: dict) -> dict:
    """Early exit was run with the model's own settings, 20 tokens and a threshold of 0.4."""
    fields = dict(case["generate_kwargs"])
    if case["mode"] != "early_exit":
        fields |= case.get("assistant_generation_config", {})
    if "assistant_model" in case:
        fields["assistant_model"] = model(case["assistant_model"])
    return fields


@functools.cache
def case_output(name: str):
    case = cases()[name]
    inputs = {k: np.array(v) for k, v in case["inputs"].items()}
    return jaxllm.generate(model(case["model"]), **inputs, **arguments(case), output_scores=True)


@pytest.mark.parametrize("case", assisted_cases(), ids=lambda case: case["id"])
@pytest.mark.usefixtures("highest_precision")
def test_conformance(case):
    out = case_output(case["id"])
    scores = np.stack(out.scores, axis=1)
    new = out.sequences[:, -scores.shape[1] :]
    actual = {
        "sequences": out.sequences.tolist(),
        "step_token_scores": np.take_along_axis(scores, new[..., None], 2)[..., 0].tolist(),
    }
    assert compare.check(case, actual, atol=1e-4) == []


def test_number_of_conformance_cases():
    assert len(assisted_cases()) == 5


class Simulation:
    """transformers' loop for one row, written plainly, with uncached passes of the draft."""

    def __init__(self, case: dict, text: list[int]):
        self.case, self.text, self.fields = case, text, arguments(case)
        self.eos = {self.fields.get("eos_token_id", -1)}
        net = model(case["model"])
        layers = self.fields.get("assistant_early_exit")
        net = net.early_exit(layers) if layers else self.fields.get("assistant_model", net)
        source = (np.array(case["inputs"]["input_ids"]), None) if net.is_encoder_decoder else ()
        # What is right of a column does not change its logits.
        self.logits = jax.jit(lambda ids: net(*source, ids).logits)

    def network(self, tokens: list[int]) -> tuple[int, float]:
        ids = np.zeros((1, 64), int)
        ids[0, : len(tokens)] = tokens
        scores = self.logits(ids)[:, len(tokens) - 1]
        penalty = self.fields.get("repetition_penalty", 1.0)
        scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores, len(tokens))
        return int(np.argmax(scores)), float(jnp.max(jax.nn.softmax(scores)))

    def lookup(self, tokens: list[int], limit: int) -> list[int]:
        for n in range(self.fields["max_matching_ngram_size"], 0, -1):
            for i in range(len(tokens) - n):
                if tokens[i : i + n] == tokens[-n:]:
                    return tokens[i + n : i + n + limit]
        return []

    def draft(self, tokens: list[int], limit: int) -> list[int]:
        if "prompt_lookup_num_tokens" in self.fields:
            return self.lookup(tokens, limit)
        actual: list[int] = []
        threshold = self.fields.get("assistant_confidence_threshold", 0.4)
        while len(actual) < limit:
            token, chance = self.network(tokens + actual)
            actual.append(token)
            if token in self.eos or chance < threshold:
                break
        return actual

    def run(self, *, first_token_is_the_prefills: bool) -> tuple[int, int, int]:
        """Forward passes of the model; tokens drafted, and accepted."""
        index = compare.prompt_len(self.case)
        end = index + self.fields["max_new_tokens"]
        number = self.fields.get(
            "prompt_lookup_num_tokens", self.fields.get("num_assistant_tokens", 20)
        )
        calls = drafted = accepted = 0
        if first_token_is_the_prefills:
            index, calls = index + 1, 1
        while index < len(self.text):
            draft = self.draft(self.text[:index], min(number, end - index - 1))
            same = [a == b for a, b in zip(draft, self.text[index:], strict=False)]
            kept = [*same, False].index(False)
            calls, drafted = calls + 1, drafted + len(draft)
            accepted += min(kept, len(self.text) - index)
            if "heuristic" in self.fields.get("num_assistant_tokens_schedule", ""):
                number = number + 2 if kept == len(draft) else max(1, number - 1)
            index += kept + 1
        return calls, drafted, accepted


@pytest.mark.by_default("s-prompt-lookup")
@pytest.mark.parametrize("case", assisted_cases(), ids=lambda case: case["id"])
@pytest.mark.usefixtures("highest_precision")
def test_forward_calls(case):
    """transformers drafts before it has read the prompt; here the prompt's pass gives a token.

    So the simulation is first held against transformers' number, and then we against it. But not
    for T5: there transformers' assistant, whose cache was cut, drafts other tokens than it does
    without a cache (at the case's fourth token 79 for 51), and so is accepted more or less often.
    """
    simulation = Simulation(case, compare.useful(case, case["expected"]["sequences"][0]))
    calls, drafted, _ = simulation.run(first_token_is_the_prefills=False)
    theirs = case["expected"]["target_forward_calls"]
    if "t5" not in case["model"]:
        assert theirs == (calls + drafted if case["mode"] == "early_exit" else calls)
    counts = case_output(case["id"]).assisted
    actual = (counts.target_calls[0], counts.drafted[0], counts.accepted[0])
    assert actual == simulation.run(first_token_is_the_prefills=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("distribution").values(), ids=lambda case: case["id"])
@pytest.mark.parametrize("assisted", [False, True])
def test_conformance_of_distributions(case, assisted):
    """The first token is the prompt pass's, so a draft needs more tokens than the two compared."""
    fields = {**case["generate_kwargs"], "max_new_tokens": 4, "eos_token_id": None}
    if assisted:
        fields |= {"assistant_model": model(case["assistant_model"]), "num_assistant_tokens": 2}
    ids, first = np.array(case["inputs"]["input_ids"]), compare.prompt_len(case)
    pairs = []
    for key in range(10):
        out = jaxllm.generate(
            model(case["model"]), ids, key=key, num_return_sequences=2000, **fields
        )
        pairs += map(tuple, out.sequences[:, first : first + 2].tolist())
    z, impossible = compare.check_distribution(case, pairs)
    assert impossible == 0
    assert z < 4.5


NEW = 14
ENSEMBLES = json.loads((DATA.parent / "ensemble" / "cases.json").read_text())


def ensemble(name: str, ids: list[list[int]], weight: float) -> list[list[int]]:
    out = jaxllm.generate(
        model(name),
        np.array(ids),
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        assistant_model=model(f"{name}_draft"),
        num_assistant_tokens=4,
        assistant_confidence_threshold=0.0,
        assistant_ensemble_weight=weight,
    )
    return out.sequences.tolist()


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c["model"] != "s_llama")) for c in ENSEMBLES],
)
@pytest.mark.usefixtures("highest_precision")
def test_an_ensemble(case):
    """Drafts are judged by a mixture of model and draft."""
    assert ensemble(case["model"], case["ids"], case["weight"]) == case["sequences"]


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
@pytest.mark.usefixtures("highest_precision")
def test_an_ensemble_of_encoder_decoders_step_by_step(weight):
    ids = [[69, 18, 6, 26, 105, 3]]

    @jax.jit
    def probabilities(model, text, length):
        logits = model(input_ids=np.array(ids), decoder_input_ids=text[None]).logits
        return jax.nn.softmax(logits[0, length - 1])

    def after(name: str, text: list[int]) -> np.ndarray:
        padded = np.zeros(NEW + 1, np.int32)
        padded[: len(text)] = text
        return np.asarray(probabilities(model(name), padded, len(text)))

    text = [0, int(after("s_t5", [0]).argmax())]
    while len(text) <= NEW:
        drafts: list[int] = []
        mixtures = []
        for _ in range(min(4, NEW - len(text))):
            q, p = (after(name, text + drafts) for name in ("s_t5_draft", "s_t5"))
            mixtures.append(weight * p + (1 - weight) * q)
            drafts.append(int(q.argmax()))
        agreed = 0
        while agreed < len(drafts) and mixtures[agreed].argmax() == drafts[agreed]:
            agreed += 1
        judge = mixtures[agreed] if agreed < len(drafts) else after("s_t5", text + drafts)
        text += [*drafts[:agreed], int(judge.argmax())]
    assert ensemble("s_t5", ids, weight) == [text]
