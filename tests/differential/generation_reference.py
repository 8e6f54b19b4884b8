"""Runs combinations with torch transformers, and feeds it jaxllm's random draws."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generation_models
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from generation_cases import ENCODER_RECORDS, RECORDS, Combination, Outcome, new_tokens

import jaxllm
from jaxllm.generation.strategies.draws import choose_sample, draw_without_replacement, row_keys

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tensors are tiny, and threads would wait for each other
FOLDER = Path(tempfile.mkdtemp())


class TooFewCandidatesError(RuntimeError):
    """Sampling without replacement was asked for more items than have a probability."""


@functools.cache
def model(name: str) -> Any:
    """The model `name` of `generation_models`, saved by jaxllm and loaded by transformers."""
    folder = FOLDER / name
    jaxllm.save_hf(folder, generation_models.model(name))
    is_t5 = generation_models.is_encoder_decoder(name)
    auto = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
    return auto.from_pretrained(
        folder, attn_implementation="eager", torch_dtype=torch.float32
    ).eval()


def run(combination: Combination) -> Outcome:
    """Generates with transformers; row by row with drafts, of which it takes one row at a time."""
    ids, mask = (torch.tensor(x) for x in combination.padded())
    fields = dict(combination.fields)
    if "dola_layers" in fields and not isinstance(fields["dola_layers"], str):
        fields["dola_layers"] = list(fields["dola_layers"])
    if combination.area not in ("drafts", "drafts, sampled"):
        return run_batch(combination, ids, mask, fields)
    if fields.get("do_sample"):
        # Looked up drafts do not change what jaxllm samples; transformers draws in another order.
        del fields["prompt_lookup_num_tokens"], fields["max_matching_ngram_size"]
    outcomes = []
    for i, row in enumerate(combination.rows):
        ids = torch.tensor([row])
        with assistant(combination, fields):
            outcomes.append(run_batch(combination, ids, torch.ones_like(ids), fields, row_id=i))
    return Outcome(
        tokens=[one.tokens[0] for one in outcomes],
        scores=[np.asarray(one.scores)[:, 0] for one in outcomes],
    )


@contextlib.contextmanager
def assistant(combination: Combination, fields: dict[str, Any]) -> Iterator[None]:
    """Adds the assistant to `fields`, with the combination's settings of drafts."""
    if combination.draft is not None:
        draft = model(combination.draft)
        for name, value in combination.assistant.items():
            setattr(draft.generation_config, name, value)
        fields["assistant_model"] = draft
    else:
        # Drafts by the model's own first layers take their settings from the model.
        for name, value in combination.assistant.items():
            setattr(model(combination.model).generation_config, name, value)
    yield


def run_batch(
    combination: Combination,
    ids: torch.Tensor,
    mask: torch.Tensor,
    fields: dict[str, Any],
    *,
    row_id: int | None = None,
) -> Outcome:
    reference = model(combination.model)
    fields |= {"attention_mask": mask, "return_dict_in_generate": True}
    with jaxllm_draws(combination, row_id):
        try:
            out = reference.generate(ids, **fields)
        except TooFewCandidatesError:
            return Outcome([], failed="too few candidates")
        except RuntimeError as error:
            if "force_words_ids" not in fields or "NoneType" not in str(error):
                raise
            # It has no beam indices for sequences that do not meet the constraints.
            out = reference.generate(ids, **fields | {"output_scores": False})
    beam_indices = out.get("beam_indices")
    start = 1 if combination.is_encoder_decoder else ids.shape[1]
    transitions = []
    if combination.area == "transition scores":
        transitions = [
            reference.compute_transition_scores(
                out.sequences, out.scores, beam_indices, normalize_logits=normalize
            ).numpy()
            for normalize in (False, True)
        ]
    scores = out.get("scores")
    indices = None if beam_indices is None else beam_indices.numpy()
    return Outcome(
        tokens=new_tokens(out.sequences.numpy(), start, combination.eos, indices),
        sequences_scores=array(out.get("sequences_scores")),
        beam_indices=indices,
        scores=None if scores is None else np.stack([x.numpy() for x in scores]),
        records={
            name: [[x.numpy() for x in layers] for layers in out[name]]
            for name in RECORDS
            if out.get(name) is not None
        },
        encoder_records={
            name: [x.numpy() for x in out[name]]
            for name in ENCODER_RECORDS
            if out.get(name) is not None
        },
        transitions=transitions,
    )


def array(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.numpy()


@contextlib.contextmanager
def own_progress() -> Iterator[None]:
    """Cures a fault of transformers: copies of a disjunction in progress share one list."""
    original = transformers.DisjunctiveConstraint.copy

    def copy(self: Any, stateful: bool = False) -> Any:
        new = original(self, stateful)
        new.current_seq = list(new.current_seq)
        return new

    transformers.DisjunctiveConstraint.copy = copy
    try:
        yield
    finally:
        transformers.DisjunctiveConstraint.copy = original


@contextlib.contextmanager
def decay_keeps_forbidden() -> Iterator[None]:
    """Cures a fault of 4.55: the decay of the length makes NaN of a forbidden end token."""
    processor = transformers.generation.ExponentialDecayLengthPenalty
    original = processor.__call__

    def call(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        decayed = original(self, input_ids, torch.where(torch.isinf(scores), 0.0, scores))
        return torch.where(torch.isinf(scores), scores, decayed)

    processor.__call__ = call
    try:
        yield
    finally:
        processor.__call__ = original


@contextlib.contextmanager
def penalty_of_own_prompt() -> Iterator[None]:
    """Cures a fault of transformers: row i of the beams is penalised by the encoder input of row i
    of the batch, though there are several beams to each, and the last ones by none."""
    processor = transformers.generation.EncoderRepetitionPenaltyLogitsProcessor
    original = processor.__call__

    def call(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        beams = scores.shape[0] // self.encoder_input_ids.shape[0]
        self.encoder_input_ids = self.encoder_input_ids.repeat_interleave(beams, dim=0)
        return original(self, input_ids, scores)

    processor.__call__ = call
    try:
        yield
    finally:
        processor.__call__ = original


CURES = {
    "encoder_repetition_penalty with beams": penalty_of_own_prompt,
    "shared progress of a disjunction": own_progress,
    "decay of a forbidden end token": decay_keeps_forbidden,
}
"""Faults of transformers that can be cured from outside."""


@contextlib.contextmanager
def nudged_weights(name: str, seed: int) -> Iterator[None]:
    """Multiplies every weight by 1 + 3e-7 * noise, a few times float32's rounding."""
    generator = torch.Generator().manual_seed(seed)
    original = {key: value.clone() for key, value in model(name).state_dict().items()}
    with torch.no_grad():
        for value in model(name).parameters():
            value.mul_(1 + 3e-7 * torch.randn(value.shape, generator=generator))
    try:
        yield
    finally:
        model(name).load_state_dict(original)


def nudged(combination: Combination) -> Iterator[Outcome]:
    """Outcomes of the combination with weights and thresholds changed by rounding errors. If one of
    them is jaxllm's, two candidates were nearly tied, or one was at the edge of a filter."""
    for seed in range(8):
        with nudged_weights(combination.model, seed):
            yield run(combination)
    for name in ("top_p", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff"):
        value = combination.fields.get(name)
        for change in (3e-7, -3e-7, 1e-6, -1e-6, 3e-6, -3e-6) if value else ():
            fields = {**combination.fields, name: min(value * (1 + change), 1.0)}
            yield run(dataclasses.replace(combination, fields=fields))


@contextlib.contextmanager
def jaxllm_draws(combination: Combination, row_id: int | None) -> Iterator[None]:
    """Replaces torch's draws by those that jaxllm makes from the combination's seed.

    The n-th call of `torch.multinomial` is step n.
    """
    if not combination.fields.get("do_sample"):
        yield
        return
    rows = np.arange(len(combination.rows)) if row_id is None else np.array([row_id])
    keys = row_keys(combination.seed, rows, len(rows), samples=1, sampling=True, under_jit=False)
    original, step = torch.multinomial, 0

    def multinomial(probs: torch.Tensor, num_samples: int, *args: Any, **options: Any) -> Any:
        nonlocal step
        if int((probs > 0).sum(dim=-1).min()) < num_samples:
            raise TooFewCandidatesError
        index = draws(keys, step, jnp.log(jnp.asarray(probs.numpy())), num_samples)
        step += 1
        return torch.tensor(np.asarray(index), dtype=torch.long)

    torch.multinomial = multinomial
    try:
        yield
    finally:
        torch.multinomial = original


@functools.partial(jax.jit, static_argnums=3)
def draws(keys: jax.Array, step: int, scores: jax.Array, count: int) -> jax.Array:
    """Draws of one step, [rows, count]."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    if count == 1:
        return choose_sample(keys, scores)[:, None]
    return draw_without_replacement(keys, scores, count, jnp.array([count]), worst=-1e9)[1]


def likely(name: str, rows: list[list[int]]) -> list[int]:
    """Tokens that the model writes after the prompts, by greedy search."""
    combination = Combination("", name, rows, {"eos_token_id": None})
    ids, mask = (torch.tensor(x) for x in combination.padded())
    out = model(name).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=generation_models.PAD,
        repetition_penalty=1.3,
    )
    return sorted(set(out[:, -8:].flatten().tolist()) - {generation_models.PAD})
