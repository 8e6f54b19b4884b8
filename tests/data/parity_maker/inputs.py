"""Kinds of calls, seeded inputs, and the calls that several families make."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Inputs = dict[str, np.ndarray | int]
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Forward:
    """model(**inputs), with hidden states and attentions when asked for."""

    inputs: Inputs
    hidden: bool = False
    attentions: bool = False


@dataclass(frozen=True)
class Grad:
    """Gradients of model(**inputs).loss with respect to the named parameters."""

    inputs: Inputs
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Rope:
    """cos and sin of Llama's rotary embedding at `position_ids`."""

    inputs: Inputs


@dataclass(frozen=True)
class Generate:
    """Greedy model.generate(**inputs); `make` draws prompts until none has a near tie.

    T5 runs without a cache: transformers sizes it by `num_layers`, and fails (IndexError) where the
    decoder is deeper than the encoder.
    """

    make: Callable[[np.random.RandomState], Inputs]
    inputs: Inputs = field(default_factory=dict)
    use_cache: bool = True


@dataclass(frozen=True)
class Beams:
    """Beam search; `make` draws sources until the best two of each row have different scores."""

    make: Callable[[np.random.RandomState], Inputs]
    inputs: Inputs = field(default_factory=dict)


ABSENT = object()  # a field that config.json does not hold


def merged(base: dict, fields: dict) -> dict:
    return {k: v for k, v in {**base, **fields}.items() if v is not ABSENT}


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    covers: str
    architecture: str
    config: dict
    calls: dict[str, Forward | Grad | Rope | Generate | Beams]
    final_norm: tuple[str, ...]
    absent: tuple[str, ...] = ()  # tied tensors that the file does not hold
    layout: Callable[[Weights, dict], Weights] = lambda weights, config: weights
    version: str = "5.23.0"


def random_state(text: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(text.encode()))


def padding_mask(lengths: tuple[int, ...], side: str) -> np.ndarray:
    width = max(lengths)
    columns = np.arange(width)[None]
    ends = np.array(lengths)[:, None]
    return (columns < ends if side == "right" else columns >= width - ends).astype(np.int64)


def tokens(rng: np.random.RandomState, mask: np.ndarray, config: dict) -> np.ndarray:
    """Ids outside the special ones (0..5), and the pad token where the mask is 0."""
    ids = rng.randint(6, config["vocab_size"], size=mask.shape)
    return np.where(mask == 1, ids, config.get("pad_token_id") or 0).astype(np.int64)


def positions(mask: np.ndarray) -> np.ndarray:
    return np.where(mask == 1, mask.cumsum(1) - 1, 1)


def decoder_only(
    rng: np.random.RandomState,
    config: dict,
    lengths: tuple[int, ...] = (4, 11, 8),
    side: str = "left",
) -> Inputs:
    mask = padding_mask(lengths, side)
    ids = tokens(rng, mask, config)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}


def with_labels(inputs: Inputs) -> Inputs:
    """Labels equal to the ids; -100 at pads, at each row's first real token and at one more.

    The model shifts labels, so a first real token's label would be predicted at a pad, where the
    attention sees nothing and each version of the reference does something else.
    """
    mask = inputs["attention_mask"]
    labels = np.where(mask == 1, inputs["input_ids"], -100)
    first = mask.argmax(1)
    labels[np.arange(len(mask)), first] = -100
    labels[0, first[0] + 2] = -100
    return {**inputs, "labels": labels}


def with_embeds(rng: np.random.RandomState, inputs: Inputs, width: int) -> Inputs:
    rest = {k: v for k, v in inputs.items() if k != "input_ids"}
    return {"inputs_embeds": noise(rng, *inputs["attention_mask"].shape, width), **rest}


def noise(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    return rng.randn(*shape).astype(np.float32)


def keep_fraction(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    """A head mask: fractions in general, one head off."""
    mask = rng.uniform(0.2, 1.5, shape).astype(np.float32)
    mask.reshape(-1)[1] = 0
    return mask


def prompts(config: dict, lengths: tuple[int, ...] = (3, 6, 5), new: int = 12) -> Generate:
    """Left-padded prompts for a decoder-only model; generate() builds the positions itself."""

    def make(rng: np.random.RandomState) -> Inputs:
        inputs = decoder_only(rng, config, lengths)
        del inputs["position_ids"]
        return {**inputs, "max_new_tokens": new}

    return Generate(make)


def encoder_decoder(
    rng: np.random.RandomState,
    config: dict,
    lengths: tuple[int, ...] = (5, 11, 8),
    targets: tuple[int, ...] = (7, 4, 6),
) -> Inputs:
    """Right-padded sources and decoder inputs that begin with the start token."""
    mask, target = padding_mask(lengths, "right"), padding_mask(targets, "right")
    ids = tokens(rng, mask, config)
    ids[mask.cumsum(1) == mask.sum(1, keepdims=True)] = config["eos_token_id"]
    ids = np.where(mask == 1, ids, config["pad_token_id"])
    decoder = tokens(rng, target, config)
    decoder[:, 0] = config["decoder_start_token_id"]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": decoder,
        "decoder_attention_mask": target,
    }


def seq2seq_labels(rng: np.random.RandomState, inputs: Inputs, config: dict) -> Inputs:
    """Labels that end in EOS, -100 after it; the model shifts them to the right itself."""
    mask = inputs["decoder_attention_mask"]
    labels = tokens(rng, mask, config)
    labels[np.arange(len(mask)), mask.sum(1) - 1] = config["eos_token_id"]
    labels = np.where(mask == 1, labels, -100)
    source = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    return {**source, "labels": labels}


def sources(config: dict, lengths: tuple[int, ...] = (5, 11, 8), new: int = 12) -> Generate:
    def make(rng: np.random.RandomState) -> Inputs:
        inputs = encoder_decoder(rng, config, lengths)
        source = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        return {**source, "max_new_tokens": new}

    return Generate(make, use_cache=False)


def decoder_calls(name: str, config: dict, width: int) -> dict:
    """The calls that every full decoder-only case makes."""
    rng = random_state(name)
    plain = decoder_only(rng, config)
    keep = np.array([7, 8, 10])  # real positions of every row
    return {
        "plain": Forward(plain, hidden=True, attentions=True),
        "bare": Forward({"input_ids": decoder_only(rng, config, (9, 9))["input_ids"]}),
        "right_padded": Forward(decoder_only(rng, config, side="right")),
        "labels": Forward(with_labels(plain)),
        "embeds": Forward(with_embeds(rng, plain, width)),
        "logits_to_keep": Forward({**plain, "logits_to_keep": 3}),
        "logits_to_keep_index": Forward({**plain, "logits_to_keep": keep}),
        "generate": prompts(config),
    }


def classifier_calls(name: str, config: dict, labels: np.ndarray) -> dict:
    """The last token that is not the pad token is pooled, on whichever side the padding is."""
    rng = random_state(name)
    left, right = decoder_only(rng, config), decoder_only(rng, config, side="right")
    bare = {"input_ids": decoder_only(rng, config, (9, 9, 9))["input_ids"]}
    return {
        "left_padded": Forward({**left, "labels": labels}, hidden=True),
        "right_padded": Forward({**right, "labels": labels}),
        "no_labels": Forward(left),
        "bare": Forward(bare),
    }


def labels_of(count: int) -> dict:
    """num_labels in the spelling of config.json."""
    return {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    }


MULTI = "multi_label_classification"
ONE = np.array([0.7, -1.2, 2.5], np.float32)
TWO = np.array([[0.7, -1.2], [0.1, 0.4], [2.5, -0.3]], np.float32)
CLASS = np.array([2, 0, 1])
BITS = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 1]], np.float32)
TASKS = {  # name: (what, num_labels, problem_type, labels)
    "regression": ("regression inferred from num_labels 1 (MSE)", 1, None, ONE),
    "regression2": ("problem_type regression, num_labels 2", 2, "regression", TWO),
    "single": ("single label inferred from integer labels (cross entropy)", 3, None, CLASS),
    "multi": ("problem_type multi_label_classification (BCE)", 4, MULTI, BITS),
}
