"""Combinations of the generation comparison: what one is, how jaxllm runs it, and how two results
are compared. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import generation_models
import numpy as np
from generation_models import PAD

import jaxllm

RECORDS = (
    "hidden_states",
    "attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
)
"""Outputs with an entry for each step, which is a tuple over the layers."""
ENCODER_RECORDS = ("encoder_hidden_states", "encoder_attentions")
ABSOLUTE, RELATIVE = 1e-4, 2e-5
"""Tolerance of scores, hidden states and attentions: float32 rounding of logits up to about 40."""

LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True)
class Combination:
    """One call of `generate`. The fields are values of JSON, so that it can be stored."""

    area: str
    model: str
    rows: list[list[int]]
    """Prompts (encoder-decoders: the encoder's inputs), of several lengths, without padding."""
    fields: dict[str, Any]
    draft: str | None = None
    """Model that writes drafts."""
    assistant: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the drafts, which transformers reads from the assistant's own config."""
    seed: int = 0

    @property
    def num_beams(self) -> int:
        return self.fields.get("num_beams", 1)

    @property
    def eos(self) -> list[int]:
        return self.fields["eos_token_id"] or []

    @property
    def is_encoder_decoder(self) -> bool:
        return generation_models.is_encoder_decoder(self.model)

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask [B, T], padded on the left, or on the right for an encoder."""
        width = max(map(len, self.rows))
        ids = np.full((len(self.rows), width), PAD)
        mask = np.zeros((len(self.rows), width), int)
        for i, row in enumerate(self.rows):
            at = slice(0, len(row)) if self.is_encoder_decoder else slice(width - len(row), None)
            ids[i, at], mask[i, at] = row, 1
        return ids, mask


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one side generated."""

    tokens: list[list[int]]
    """New tokens of each returned sequence, up to and with its end token."""
    sequences_scores: np.ndarray | None = None
    beam_indices: np.ndarray | None = None
    scores: np.ndarray | list[np.ndarray] | None = None
    """Processed scores [steps, rows, V]; with drafts one [steps, V] for each row."""
    records: dict[str, list[list[np.ndarray]]] = dataclasses.field(default_factory=dict)
    encoder_records: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    transitions: list[np.ndarray] = dataclasses.field(default_factory=list)
    """`compute_transition_scores`, plain and normalized."""
    failed: str | None = None
    """Why this side gave no result."""


@dataclasses.dataclass(frozen=True)
class Difference:
    text: str
    margin: float = np.inf
    """Greedy search: distance between the best two scores where the tokens part."""
    takes_forbidden: bool = False
    """The reference took a token of score minus infinity there."""


def run(combination: Combination) -> Outcome:
    """Generates with jaxllm."""
    out = generate(combination)
    start = 1 if combination.is_encoder_decoder else combination.padded()[0].shape[1]
    transitions = []
    if combination.area == "transition scores":
        for normalize in (False, True):
            scores = jaxllm.generation.compute_transition_scores(
                out.sequences, out.scores, out.beam_indices, normalize_logits=normalize
            )
            transitions.append(np.asarray(scores))
    return Outcome(
        tokens=new_tokens(out.sequences, start, combination.eos, out.beam_indices),
        sequences_scores=out.sequences_scores,
        beam_indices=out.beam_indices,
        scores=None if out.scores is None else np.stack(out.scores),
        records={k: getattr(out, k) for k in RECORDS if getattr(out, k) is not None},
        encoder_records={
            k: getattr(out, k) for k in ENCODER_RECORDS if getattr(out, k) is not None
        },
        transitions=transitions,
    )


def generate(combination: Combination, **changes: Any) -> jaxllm.generation.GenerateOutput:
    """The call of jaxllm."""
    ids, mask = combination.padded()
    fields = {**combination.fields, **combination.assistant, **changes}
    if combination.draft is not None:
        fields["assistant_model"] = generation_models.model(combination.draft)
    model = generation_models.model(combination.model)
    return jaxllm.generate(model, ids, mask, key=combination.seed, **fields)


def new_tokens(
    sequences: np.ndarray, start: int, eos: list[int], beam_indices: np.ndarray | None
) -> list[list[int]]:
    """New tokens of each row up to and with its first end token; with beams, as many as it has
    beam indices, since transformers fills the rest of the row with an end token."""
    rows = []
    for i, row in enumerate(np.asarray(sequences)[:, start:].tolist()):
        if beam_indices is not None:
            row = row[: int((np.asarray(beam_indices)[i] >= 0).sum())]
        ends = [at for at, token in enumerate(row) if token in eos]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


def compare(
    combination: Combination, expected: Outcome, actual: Outcome | None
) -> Difference | None:
    """The first difference between the outcomes, or None. `actual` is None if jaxllm raised."""
    if actual is None:
        return Difference("jaxllm raised NonFiniteError")
    if len(actual.tokens) != len(expected.tokens):
        return Difference(f"{len(actual.tokens)} sequences, expected {len(expected.tokens)}")
    for i, (wanted, got) in enumerate(zip(expected.tokens, actual.tokens, strict=True)):
        if wanted != got:
            text = f"sequence {i}: expected {wanted}, found {got}"
            step = next(
                (t for t, pair in enumerate(zip(wanted, got, strict=False)) if len(set(pair)) > 1),
                min(len(wanted), len(got)),
            )
            if combination.num_beams > 1 or combination.fields.get("do_sample"):
                return Difference(text)
            return Difference(text, *margin(expected, i, step, wanted))
    for name in ("sequences_scores", "transitions"):
        wanted, got = getattr(expected, name), getattr(actual, name)
        if wanted is None:
            continue
        for i, pair in enumerate(zip(listed(wanted), listed(got), strict=True)):
            if pair[0].shape != pair[1].shape or is_far(*pair):
                return Difference(f"{name} {i}: expected {pair[0]}, found {pair[1]}")
    return different_scores(combination, expected, actual) or different_records(
        combination, expected, actual
    )


def listed(value: Any) -> list[np.ndarray]:
    if value is None:
        return []
    return [np.asarray(x) for x in value] if isinstance(value, list) else [np.asarray(value)]


def is_far(wanted: np.ndarray, got: np.ndarray) -> bool:
    """True unless all values agree, infinities included."""
    return not np.allclose(wanted, got, rtol=RELATIVE, atol=ABSOLUTE)


def margin(expected: Outcome, row: int, step: int, tokens: list[int]) -> tuple[float, bool]:
    """Distance between the best scores of the reference, and whether it took a forbidden token."""
    scores = expected.scores
    if scores is None:
        return np.inf, False
    of_row = scores[row] if isinstance(scores, list) else scores[:, row]
    if step >= len(tokens) or not np.isfinite(of_row[step]).any():
        return np.inf, False
    best = np.sort(of_row[step][np.isfinite(of_row[step])])[::-1]
    gap = float(best[0] - best[1]) if best.size > 1 else np.inf
    return gap, bool(np.isneginf(of_row[step][tokens[step]]))


def live_steps(combination: Combination, expected: Outcome) -> np.ndarray:
    """Of each row of the scores, the steps in which it was not finished."""
    lengths = np.array([len(row) for row in expected.tokens])
    if combination.num_beams == 1:
        return lengths
    of_item = lengths.reshape(len(combination.rows), -1).max(axis=1)
    return np.repeat(of_item, combination.num_beams)


def different_scores(
    combination: Combination, expected: Outcome, actual: Outcome
) -> Difference | None:
    if expected.scores is None or actual.scores is None:
        return None
    for row, steps in enumerate(live_steps(combination, expected)):
        for step in range(steps):
            if isinstance(expected.scores, list):
                wanted = expected.scores[row][step]
            else:
                wanted = expected.scores[step, row]
            got = actual.scores[step][row]
            if "force_words_ids" in combination.fields:
                # jaxllm has float32's minimum in place of the infinite sum of a forbidden beam.
                got = np.where(got <= LOWEST, -np.inf, got)
            if is_far(wanted, got):
                at = int(np.argmax(~np.isclose(wanted, got, RELATIVE, ABSOLUTE)))
                return Difference(
                    f"scores of step {step}, row {row}, token {at}: "
                    f"expected {wanted[at]}, found {got[at]}"
                )
    return None


def different_records(
    combination: Combination, expected: Outcome, actual: Outcome
) -> Difference | None:
    """Compares hidden states and attentions at real columns of unfinished rows."""
    mask = combination.padded()[1].astype(bool)
    beams = combination.num_beams
    for name, layers in expected.encoder_records.items():
        for layer, wanted in enumerate(layers):
            got = np.asarray(actual.encoder_records[name][layer])
            if wanted.shape != got.shape:
                return Difference(f"{name} {layer}: expected {wanted.shape}, found {got.shape}")
            if is_far(columns(wanted)[mask], columns(got)[mask]):
                return Difference(f"{name} {layer} differs")
    if combination.is_encoder_decoder:
        mask = np.ones((len(combination.rows), 1), bool)
    mask = np.repeat(mask, beams, axis=0)
    live = live_steps(combination, expected)
    for name, steps in expected.records.items():
        if len(steps) != len(actual.records[name]):
            found = len(actual.records[name])
            return Difference(f"{name}: expected {len(steps)} steps, found {found}")
        for step, layers in enumerate(steps):
            real = mask & (live > step)[:, None] if step == 0 else (live > step)[:, None]
            for layer, wanted in enumerate(layers):
                got = np.asarray(actual.records[name][step][layer])
                place = f"{name} of step {step}, layer {layer}"
                if wanted.shape != got.shape:
                    return Difference(f"{place}: expected {wanted.shape}, found {got.shape}")
                if is_far(columns(wanted)[real], columns(got)[real]):
                    return Difference(f"{place} differs")
    return None


def columns(x: np.ndarray) -> np.ndarray:
    """Attentions [R, heads, T, S] as [R, T, heads, S]; hidden states as they are."""
    return np.moveaxis(x, 1, 2) if x.ndim == 4 else x


def summary(combination: Combination, outcome: Outcome) -> dict[str, Any]:
    """What is stored of an outcome, as values of JSON: tokens, the score of each, and for records
    one number of each real column (`digest`)."""
    found: dict[str, Any] = {"tokens": outcome.tokens}
    if outcome.sequences_scores is not None:
        found["sequences_scores"] = rounded(outcome.sequences_scores)
    if outcome.transitions:
        found["transitions"] = [
            [rounded(row[: len(tokens)]) for row, tokens in zip(x, outcome.tokens, strict=True)]
            for x in outcome.transitions
        ]
    # Transformers returns no beam indices with constraints.
    if outcome.scores is not None and (combination.num_beams == 1) == (
        outcome.beam_indices is None
    ):
        found["token_scores"] = [
            rounded([score_of(outcome, i, t, token) for t, token in enumerate(row)])
            for i, row in enumerate(outcome.tokens)
        ]
    live = live_steps(combination, outcome)
    mask = combination.padded()[1].astype(bool)
    for name, layers in outcome.encoder_records.items():
        found[name] = [digest(np.asarray(x), mask) for x in layers]
    if combination.is_encoder_decoder:
        mask = np.ones((len(combination.rows), 1), bool)
    mask = np.repeat(mask, combination.num_beams, axis=0)
    for name, steps in outcome.records.items():
        found[name] = []
        for t, layers in enumerate(steps):
            alive = (live > t)[:, None]
            real = alive & mask if t == 0 else alive
            found[name].append([digest(np.asarray(x), real) for x in layers])
    return found


def score_of(outcome: Outcome, sequence: int, step: int, token: int) -> float:
    """Processed score of a chosen token."""
    if isinstance(outcome.scores, list):
        return float(outcome.scores[sequence][step, token])
    row = sequence if outcome.beam_indices is None else outcome.beam_indices[sequence][step]
    assert outcome.scores is not None
    return float(outcome.scores[step, row, token])


def digest(x: np.ndarray, real: np.ndarray) -> list[Any]:
    """The shape, and of each real column a weighted mean of its values."""
    values = columns(x)
    weights = np.cos(np.arange(values[0, 0].size)).reshape(values.shape[2:])
    means = (values * weights).mean(axis=tuple(range(2, values.ndim)))
    return [list(x.shape), rounded(means[np.broadcast_to(real, means.shape)])]


def rounded(values: Any) -> list[float]:
    return [float(f"{x:.6g}") for x in np.asarray(values, np.float64).ravel()]
