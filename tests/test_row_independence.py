"""A row's result depends on that row alone: for every public entry point that computes rows.

Each configuration is one model, whose rows of random lengths and paddings run together and alone.
Shapes are few, so that every example after the first uses compiled programs.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer

import jaxllm
import jaxllm.batch
import jaxllm.evaluate
import jaxllm.serve
import jaxllm.training
from jaxllm.batch.row_tasks import RowEmbedder, RowScorer
from jaxllm.batch.rows import RawRow
from jaxllm.training.dpo import pair_logps
from jaxllm.training.evaluation import evaluate
from jaxllm.training.losses import loss_for

TOKENIZER = small_tokenizer("llama.model")
VOCABULARY = len(TOKENIZER)
WIDTH = 16
"""Columns of a batch, and the smallest bucket of lengths."""
ROWS = 3
NEW_TOKENS = 3

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 6}
LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "factor": 8.0,
    },
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}
QUANTIZED = {"cache_implementation": "quantized", "cache_config": {"nbits": 8}}
RING = {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 4}}

# Family, changes of its tiny config, and generation fields that choose the kind of KV cache.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-dynamic": ("llama", DYNAMIC, {}),
    "llama-longrope-quantized": ("llama", LONGROPE, QUANTIZED),
    "llama-yarn-ring": ("llama", YARN, RING),
    "mistral-window": ("mistral", {}, {}),
    "mistral-window-quantized": ("mistral", {}, QUANTIZED),
    "mistral-window-dynamic": ("mistral", DYNAMIC, {}),
    "qwen2-some-windows": ("qwen2", {"num_hidden_layers": 2}, {}),
    "qwen3-longrope": ("qwen3", LONGROPE, {}),
    "gpt2": ("gpt2", {}, {}),
    "gpt2-ring": ("gpt2", {}, RING),
    "bloom": ("bloom", {"seq_length": 16}, {}),
    "bloom-ring": ("bloom", {"seq_length": 16}, RING),
    "t5": ("t5", {}, {}),
}
ONE_LAYER = {
    "gpt2": {"n_layer": 1},
    "bloom": {"n_layer": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}


@functools.cache
def model(name: str) -> Any:
    family, changes, _ = CONFIGURATIONS[name]
    layers = ONE_LAYER.get(family, {"num_hidden_layers": 1})
    return tiny.make(family, vocab_size=VOCABULARY, **{**layers, **changes})


def cache_fields(name: str) -> dict[str, Any]:
    return CONFIGURATIONS[name][2]


Rows = list[list[int]]
"""Token ids of rows."""


@st.composite
def uneven(draw: st.DrawFn) -> Rows:
    """Rows of at least 2 tokens, one short and one long enough for every limit of RoPE."""
    lengths = [draw(st.integers(2, 5)), draw(st.integers(10, WIDTH - NEW_TOKENS))]
    lengths += [draw(st.integers(2, WIDTH - NEW_TOKENS)) for _ in range(ROWS - 2)]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return [rng.integers(3, VOCABULARY, n).tolist() for n in draw(st.permutations(lengths))]


def padded(rows: Rows, sides: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and padding mask [rows, WIDTH], each row padded on the left (True) or the right."""
    ids, mask = np.zeros((len(rows), WIDTH), np.int32), np.zeros((len(rows), WIDTH), np.int32)
    for i, (row, left) in enumerate(zip(rows, sides, strict=True)):
        columns = slice(WIDTH - len(row), None) if left else slice(len(row))
        ids[i, columns], mask[i, columns] = row, 1
    return ids, mask


def packed(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The rows as documents of one row [1, ROWS * WIDTH], and the number of each document."""
    ids, segments = np.zeros((1, ROWS * WIDTH), np.int32), np.zeros((1, ROWS * WIDTH), np.int32)
    start = 0
    for number, row in enumerate(rows, start=1):
        ids[0, start : start + len(row)], segments[0, start : start + len(row)] = row, number
        start += len(row)
    return ids, segments


@functools.cache
def forward_program(name: str) -> Any:
    """The forward pass under jit. Without RoPE that depends on a length the default must do."""
    options = {} if model(name).is_encoder_decoder else {"rope_length": "row"}
    return jax.jit(lambda net, **inputs: net(**inputs, **options).logits)


def forward(name: str, rows: Rows, sides: list[bool]) -> None:
    net, run = model(name), forward_program(name)

    def logits(rows: Rows, sides: list[bool]) -> list[np.ndarray]:
        ids, mask = padded(rows, sides)
        own = {"decoder_input_ids": ids} if net.is_encoder_decoder else {}
        real = np.ones_like(mask) if net.is_encoder_decoder else mask
        out = np.asarray(run(net, input_ids=ids, attention_mask=mask, **own))
        return [out[i][real[i] == 1] for i in range(len(rows))]

    together = logits(rows, sides)
    for row, side, expected in zip(rows, sides, together, strict=True):
        close(logits([row], [side])[0], expected)
    if not net.is_encoder_decoder:
        ids, segments = packed(rows)
        positions = np.zeros_like(ids)  # from 0 on in each document, and large at pads
        positions[0] = np.concatenate([*map(np.arange, map(len, rows)), np.arange(99)])[: ids.size]
        given = {"position_ids": positions} if net.backbone.takes_position_ids else {}
        for own in ({}, given):
            documents = np.asarray(run(net, input_ids=ids, segment_ids=segments, **own))
            close(documents[segments > 0], np.concatenate(together))


def generate(name: str, rows: Rows, sides: list[bool]) -> None:
    """Left and right padding in one call; the scores are compared, not only the tokens."""
    net = model(name)
    fields = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "output_scores": True}
    fields |= {"rope_length": "row", **cache_fields(name)}
    ids, mask = padded(rows, sides)
    together = np.asarray(jaxllm.generate(net, ids, mask, **fields).scores)
    for i, row in enumerate(rows):
        alone = jaxllm.generate(net, *padded([row], [sides[i]]), **fields)
        close(np.asarray(alone.scores)[:, 0], together[:, i])


def score(name: str, rows: Rows, sides: list[bool]) -> None:
    net = model(name)
    prompts, completions = [row[:-1] for row in rows], [row[-1:] for row in rows]
    together = jaxllm.score(net, prompts, completions).log_likelihoods
    alone = [
        jaxllm.score(net, [prompt], [completion]).log_likelihoods[0]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    close(together, alone)
    close(row_task(RowScorer(net, TOKENIZER), prompts, completions, "log_likelihood"), alone)


def row_task(engine: Any, rows: Rows, completions: Rows | list[None], attribute: str) -> list[Any]:
    """Results of `jaxllm generate --score` and `--embed`."""
    raw = [
        RawRow(i, i, {"input_ids": row} if new is None else {"input_ids": row, "completion": new})
        for i, (row, new) in enumerate(zip(rows, completions, strict=True))
    ]
    outputs = sorted(engine.answer(raw), key=lambda output: output.index)
    return [getattr(output, attribute) for output in outputs]


def embed(name: str, rows: Rows, sides: list[bool]) -> None:
    rows = [row[: model(name).config.context_length] for row in rows]
    engine = RowEmbedder(model(name), TOKENIZER, batch_size=ROWS)
    together = row_task(engine, rows, [None] * ROWS, "embedding")
    for row, expected in zip(rows, together, strict=True):
        close(row_task(engine, [row], [None], "embedding")[0], expected)


def perplexity(name: str, rows: Rows, sides: list[bool]) -> None:
    """Windows of one text are the rows; the last one is shorter than the others."""
    net = model(name)
    if net.is_encoder_decoder:
        return
    text = TOKENIZER.decode([token for row in rows for token in row])
    context = min(12, net.config.context_length)
    both = [
        jaxllm.evaluate.perplexity(net, TOKENIZER, text, context=context, batch_size=size)
        for size in (ROWS, 1)
    ]
    close(both[0].log_likelihood, both[1].log_likelihood)
    predicted = len(TOKENIZER.encode(text)) - 1
    assert both[0].tokens == both[1].tokens == predicted


def evaluation(name: str, rows: Rows, sides: list[bool]) -> None:
    """The summed loss of a batch is the sum of its rows' losses; packed, of its documents'."""
    net = model(name)

    def batch(rows: Rows) -> dict[str, np.ndarray]:
        ids, mask = padded(rows, [False] * len(rows))
        return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}

    def total(batch: dict[str, np.ndarray]) -> float:
        result = evaluate(net, [batch], loss_for(net))
        return result.loss * result.count

    alone = sum(total(batch([row])) for row in rows)
    close(total(batch(rows)), alone)
    if not net.is_encoder_decoder:
        ids, segments = packed(rows)
        labels = np.where(segments > 0, ids, -100)
        close(total({"input_ids": ids, "segment_ids": segments, "labels": labels}), alone)


def classification(name: str, rows: Rows, sides: list[bool]) -> None:
    """The summed loss of a classifier."""
    net = classifier(name)
    loss = loss_for(net)

    def total(rows: Rows) -> float:
        ids, mask = padded(rows, [False] * len(rows))
        labels = np.array([sum(row) % 3 for row in rows], np.int32)
        result = evaluate(net, [{"input_ids": ids, "attention_mask": mask, "labels": labels}], loss)
        return result.loss * result.count

    close(total(rows), sum(total([row]) for row in rows))


@functools.cache
def classifier(name: str) -> Any:
    family, changes, _ = CONFIGURATIONS[name]
    return tiny.make(
        family,
        architecture="LlamaForSequenceClassification",
        num_labels=3,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        **changes,
    )


def pipeline(name: str, rows: Rows, sides: list[bool]) -> None:
    """Scores of texts, in batches of all and one at a time."""
    texts = [TOKENIZER.decode(row) for row in rows]

    def scores(batch_size: int) -> list[list[float]]:
        classify = jaxllm.pipeline(
            "text-classification", classifier(name), TOKENIZER, batch_size=batch_size
        )
        return [
            [label["score"] for label in sorted(labels, key=lambda label: label["label"])]
            for labels in classify(texts, top_k=None)
        ]

    close(scores(ROWS), scores(1))


PAIR_LOGPS = jax.jit(lambda net, batch: pair_logps(net, batch)[0])


def dpo(name: str, rows: Rows, sides: list[bool]) -> None:
    """Log-probabilities of chosen and rejected answers."""
    net = model(name)

    def batch(rows: Rows) -> dict[str, np.ndarray]:
        ids, mask = padded(rows, [False] * len(rows))
        one = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}
        return {key: np.stack([x, np.roll(x, 1, axis=0)], axis=1) for key, x in one.items()}

    together = np.asarray(PAIR_LOGPS(net, batch(rows)))[:, 0]
    alone = [np.asarray(PAIR_LOGPS(net, batch([row])))[0, 0] for row in rows]
    close(together, alone)


def batch_engine(name: str, rows: Rows, sides: list[bool]) -> None:
    engine = jaxllm.BatchGenerator(
        model(name), slots=2, max_new_tokens=NEW_TOKENS, eos_token_id=None, **cache_fields(name)
    )
    together = [output.output_ids for output in engine.generate(rows)]
    assert together == [engine.generate([row])[0].output_ids for row in rows]


def server(name: str, rows: Rows, sides: list[bool]) -> None:
    """Requests side by side with log-probabilities, and each of them alone."""

    async def answer(engine: Any, row: list[int]) -> list[float]:
        request = {"input_ids": row, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
        async with engine.submit(request, logprobs=True) as stream:
            tokens = [token async for chunk in stream for token in chunk.logprobs]
        close([token.logprob for token in tokens], [token.top[0][1] for token in tokens])  # greedy
        return [token.logprob for token in tokens]

    async def main() -> None:
        options: dict[str, Any] = {"slots": 2, "context": 16, "kept_prefixes": 0, "warm_up": False}
        async with jaxllm.serve.AsyncEngine(model(name), **options) as engine:
            together = await asyncio.gather(*(answer(engine, row) for row in rows))
            for row, expected in zip(rows, together, strict=True):
                close(await answer(engine, row), expected)

    asyncio.run(main())


def close(actual: Any, expected: Any) -> None:
    """Equal to the rounding of float32 in programs of other shapes."""
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


CHECKS: dict[str, Callable[[str, Rows, list[bool]], None]] = {
    "forward": forward,
    "generate": generate,
    "score": score,
    "embed": embed,
    "perplexity": perplexity,
    "evaluation": evaluation,
    "dpo": dpo,
    "batch_engine": batch_engine,
}
DECODING = (generate, batch_engine)
"""Checks that depend on the kind of KV cache, whose programs take the longest to compile."""
BY_DEFAULT = ("llama-longrope-quantized", "mistral-window-dynamic", "t5")
"""Configurations of the decoding checks in the default run."""
ANOTHER_CACHE = ("mistral-window-quantized", "gpt2-ring", "bloom-ring")
"""Configurations whose model is that of another one."""
CI = [pytest.mark.ci]
CASES = [
    pytest.param(
        name,
        check,
        id=f"{name}-{check.__name__}",
        marks=[] if name in BY_DEFAULT or not (check in DECODING or name == "bloom") else CI,
    )
    for name in CONFIGURATIONS
    for check in CHECKS.values()
    if check in DECODING or name not in ANOTHER_CACHE
]
CASES += [
    pytest.param("llama-dynamic", classification, id="llama-dynamic-classification"),
    pytest.param("llama-dynamic", pipeline, id="llama-dynamic-pipeline", marks=pytest.mark.ci),
    pytest.param("llama-dynamic", server, id="llama-dynamic-server"),
    pytest.param("mistral-window", server, id="mistral-window-server", marks=pytest.mark.ci),
    pytest.param("t5", server, id="t5-server", marks=pytest.mark.ci),
]


@pytest.mark.parametrize(("name", "check"), CASES)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(rows=uneven(), sides=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_a_row_in_a_batch_equals_the_row_alone(name, check, rows, sides):
    check(name, rows, sides)


# Every public name of the packages below either computes rows, and has a check above, or does not.
CHECKED = {
    "AsyncEngine": server,
    "BatchGenerator": batch_engine,
    "CausalLoss": evaluation,
    "ClassificationLoss": classification,
    "DPOLoss": dpo,
    "Seq2SeqLoss": evaluation,
    "embed": embed,
    "generate": generate,
    "generate_texts": batch_engine,  # which it calls
    "loss_for": evaluation,
    "make_train_step": evaluation,  # it differentiates the losses of an evaluation
    "perplexity": perplexity,
    "pipeline": pipeline,
    "score": score,
    "stream": generate,  # the same programs
}
COMPUTES_NO_ROWS = {
    *("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"),
    *("AutoModelForSequenceClassification", "AutoTokenizer", "BatchCounts", "BatchOutput"),
    *("Chunk", "DPOConfig", "EngineStoppedError", "GenerationConfig"),
    *("GenerationStream", "JaxLLMError", "LossSums", "OptimizerConfig", "PerplexityOutput"),
    *("Prediction", "QueueFullError", "TokenLogprob", "TrainState"),
    *("enable_compile_cache", "labels", "load"),
    *("load_orbax", "make_mesh", "make_optimizer", "make_schedule", "plan"),
    *("push_to_hub", "save_hf", "save_orbax", "set_progress", "train", "with_classifier"),
}


def test_every_public_name_is_classified():
    packages = (jaxllm, jaxllm.auto, jaxllm.batch, jaxllm.evaluate, jaxllm.serve, jaxllm.training)
    public = {name for package in packages for name in package.__all__}
    known = CHECKED.keys() | COMPUTES_NO_ROWS
    assert public - known == set(), "add a check of its rows to this file, or say that it has none"
    assert known - public == set()


def test_the_length_of_the_batch_is_the_default_of_generate_and_of_a_call():
    """As in transformers: a short row changes beside a long one with dynamic RoPE."""
    net, run = model("llama-dynamic"), jax.jit(lambda net, **inputs: net(**inputs).logits)
    ids, mask = padded([[5, 6, 7], list(range(3, 16))], [False, False])
    inputs = {"input_ids": ids, "attention_mask": mask}
    own = np.asarray(forward_program("llama-dynamic")(net, **inputs))
    together = np.asarray(run(net, **inputs))
    assert np.abs(together[0, :3] - own[0, :3]).max() > 0.01
    close(together[1, :13], own[1, :13])
    with pytest.raises(jaxllm.JaxLLMError, match=r"rope_length: expected 'batch' or 'row'"):
        net(ids, rope_length="longest")
    with pytest.raises(jaxllm.JaxLLMError, match=r"rope_length: expected 'batch' or 'row'"):
        jaxllm.generate(net, ids, rope_length="longest")
