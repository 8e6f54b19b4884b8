"""Tasks of `pipeline`: functions of a model, its tokenizer and a list of inputs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxllm.common import public
from jaxllm.common.arguments import checked_count
from jaxllm.common.errors import ConfigError, InputError, NonFiniteError, quoted
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.arguments import run_in_batches
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.resolve import cut_options, target_settings, with_default_length
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier, with_rope_per_row
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.model import BaseModel, Model
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.batch import Truncation

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages of a conversation: ``{"role": ..., "content": ...}``."""
Tokenized: TypeAlias = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """A model with its tokenizer, and the number of inputs of a batch."""

    model: Any
    tokenizer: Tokenizer
    batch_size: int = 8
    prefix: str = ""
    """Text in front of every prompt that is a string."""

    def __post_init__(self) -> None:
        checked_count(self.batch_size, "batch_size")


def with_task_settings(task: str, model: Model[Any]) -> tuple[Model[Any], str]:
    """The model with the generation defaults that an old config.json has for a task, and a prefix.

    As in transformers' pipelines, `task_specific_params` has generation fields and the prefix of
    prompts by the name of a task, and `prefix` is that of all tasks.
    """
    if task not in ("text-generation", "text2text-generation", "translation"):
        return model, ""
    origin = model.checked_card("pipeline").origin
    if origin is None:
        return model, ""
    config, where = json.loads(origin.config), f"{origin.file}: task_specific_params"
    tasks = _object(config.get("task_specific_params"), where)
    where = f"{where}.{task}"
    fields = {**_object(tasks.get(task), where)}
    prefix = fields.pop("prefix", config.get("prefix")) or ""
    if not isinstance(prefix, str):
        raise ConfigError(f"{origin.file}: prefix: expected a text, found {quoted(prefix)}")
    if fields:
        defaults = model.generation_config or GenerationConfig()
        settings = defaults.merge(GenerationConfig.from_dict(fields, where))
        model = model.with_card(generation_config=settings)
    return model, prefix


def _object(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object of a file; empty for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, found {quoted(value)}")
    return value


def _generate(
    pipe: TaskModel, prompts: Tokenized, key: Any, fields: Mapping[str, Any]
) -> Iterator[list[list[int]]]:
    """Token ids of each prompt's results: prompt and answer, or an encoder-decoder's answer.

    Without the padding after a stop string, which may be any token.
    """
    settings = GenerationConfig(**fields)
    for number, ids in enumerate(prompts):
        _check_length(pipe, number, len(ids) + (not pipe.model.is_encoder_decoder))
    # In the order of the prompts: max_length counts the padding of a batch.
    for first in range(0, len(prompts), pipe.batch_size):
        rows = prompts[first : first + pipe.batch_size]
        batch = pipe.tokenizer.pad(rows, padding_side="left", return_tensors="np")
        width = batch.input_ids.shape[1]
        config = with_default_length(settings, pipe.model, width)
        # Row ids go on from batch to batch, so that rows draw different numbers.
        ids = np.arange(first, first + len(rows))
        call = {"row_ids": ids, "tokenizer": pipe.tokenizer, "rope_length": "row"}
        out = generate(pipe.model, batch.input_ids, batch.attention_mask, config, key, **call)
        ends = out.sequences.shape[1] - np.max(out.lengths) + out.lengths
        results = zip(out.sequences.tolist(), ends.tolist(), strict=True)
        samples = len(ends) // len(rows)
        for prompt in rows:
            start = 0 if pipe.model.is_encoder_decoder else width - len(prompt)
            yield [row[start:end] for row, end in itertools.islice(results, samples)]


def _check_length(pipe: TaskModel, number: int, length: int) -> None:
    """Raises InputError for an input that needs more positions than the model has."""
    limit = pipe.model.config.max_positions
    if limit is not None and length > limit:
        raise InputError(
            f"inputs[{number}]: needs {length} positions, but the model has {limit}; shorten it, "
            "or give truncation=True"
        )


def _text_generation(
    pipe: TaskModel,
    inputs: list[str | Chat],
    *,
    return_full_text: bool = True,
    truncation: Truncation = False,
    max_source_length: int | None = None,
    key: Any = None,
    **fields: Any,
) -> Iterator[list[dict[str, Any]]]:
    tokenizer = pipe.tokenizer

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    new = fields.get("max_new_tokens")
    cut = cut_options(pipe.model, tokenizer, truncation, max_source_length, new)
    prompts: list[list[int]] = []
    for number, each in enumerate(inputs):
        try:
            if isinstance(each, str):
                prompts.append(tokenizer.encode(pipe.prefix + each, **cut))
            else:
                prompts.append(tokenizer.apply_chat_template(each))
        except InputError as error:
            raise InputError(f"inputs[{number}]: {error}") from None
    sequences = _generate(pipe, prompts, key, fields)
    for prompt, ids_of_prompt, rows in zip(inputs, prompts, sequences, strict=True):
        # The answer begins with a space that decoding it alone would lose.
        answers = [text_of(ids)[len(text_of(ids_of_prompt)) :] for ids in rows]
        if return_full_text:
            answers = [_after(prompt, answer) for answer in answers]
        yield [{"generated_text": answer} for answer in answers]


def _after(prompt: str | Chat, answer: str) -> str | list[Mapping[str, Any]]:
    """The prompt and its answer: one text, or the messages of a chat."""
    if isinstance(prompt, str):
        return prompt + answer
    return [*prompt, {"role": "assistant", "content": answer}]


def _text_to_text(
    name: str,
    pipe: TaskModel,
    inputs: list[str],
    *,
    key: Any = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    truncation: Truncation = False,
    max_source_length: int | None = None,
    **fields: Any,
) -> Iterator[list[dict[str, str]]]:
    tokenizer = pipe.tokenizer.with_languages(src_lang)
    target_settings(pipe.model, tokenizer, fields, tgt_lang)
    for number, text in enumerate(inputs):
        tokenizer.check_not_blank(text, f"inputs[{number}]")
    cut = cut_options(pipe.model, tokenizer, truncation, max_source_length)
    prompts = [tokenizer.encode(pipe.prefix + text, **cut) for text in inputs]
    for results in _generate(pipe, prompts, key, tokenizer.with_target(fields, tgt_lang)):
        texts = tokenizer.batch_decode(results, skip_special_tokens=True)
        yield [{name: text} for text in texts]


@jax.jit
def _forward(model: Any, batch: Mapping[str, Array]) -> Any:
    return model(**batch)


def _outputs(
    pipe: TaskModel,
    inputs: list[Any],
    rows_of: Callable[[np.ndarray, Any], Sequence[np.ndarray]],
    **encoding: Any,
) -> list[np.ndarray]:
    """Runs the model on texts, or on mappings of a `text` and its `text_pair`.

    Args:
        encoding: options of the tokenizer.
        rows_of: computes the result of each row, from a batch's padding mask and model output.

    Raises:
        NonFiniteError: a result is NaN or infinite.
    """
    model = with_rope_per_row(pipe.model)

    def run(rows: list[Any]) -> Sequence[np.ndarray]:
        options = {"bucket": "power_of_two", "return_tensors": "np", **encoding}
        numbers, *texts = map(list, zip(*rows, strict=True))
        batch: Any = pipe.tokenizer(*texts, **options)
        for number, mask in zip(numbers, batch.attention_mask, strict=True):
            _check_length(pipe, number, mask.sum())
        return rows_of(np.asarray(batch.attention_mask), _forward(model, dict(batch)))

    pairs = [{"text": x} if isinstance(x, str) else x for x in inputs]
    rows = [(i, x["text"], x.get("text_pair") or None) for i, x in enumerate(pairs)]
    length: Any = lambda row: sum(len(text or "") for text in row[1:])  # noqa: E731
    results = dict(run_in_batches(run, rows, pipe.batch_size, length=length))
    for number in range(len(inputs)):
        if not np.isfinite(results[number]).all():
            raise NonFiniteError(
                f"inputs[{number}]: the model's output is NaN or infinite; check the weights, or "
                "load it with dtype='float32'"
            )
    return [results[i] for i in range(len(inputs))]


def _classification(
    pipe: TaskModel,
    inputs: list[str | Mapping[str, str]],
    *,
    top_k: int | None = 1,
    truncation: Truncation = False,
    max_length: int | None = None,
) -> Iterator[Any]:
    names, config = label_names(pipe.model), pipe.model.config

    def probabilities_of(_: np.ndarray, out: Any) -> list[np.ndarray]:
        return list(np.asarray(_probabilities(out.logits, config)))

    encoding = {"truncation": truncation, "max_length": max_length}
    for row in _outputs(pipe, inputs, probabilities_of, **encoding):
        best = np.argsort(-row, stable=True)[:top_k]
        labels = [{"label": names[i], "score": float(row[i])} for i in best]
        yield labels[0] if top_k == 1 else labels


def _probabilities(logits: Float[Array, "B C"], config: ModelConfig) -> Float[Array, "B C"]:
    """Label probabilities by `problem_type`; a regression's values stay as they are."""
    if config.problem_type == "regression":
        return logits
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits)


def label_names(model: Model[Any]) -> list[str]:
    """Names of a classifier's labels: `id2label` of its config.json, else LABEL_0, ..."""
    origin = model.checked_card("label names").origin
    config = {} if origin is None else json.loads(origin.config)
    names = config.get("id2label") or {}
    return [names.get(str(i), f"LABEL_{i}") for i in range(model.config.num_labels)]


def _features(
    pipe: TaskModel,
    inputs: list[str],
    *,
    pooling: str | None = "auto",
    truncation: Truncation = False,
    max_length: int | None = None,
) -> Iterator[np.ndarray]:
    if pooling not in ("auto", "mean", None):
        raise InputError(f"pooling is {pooling!r}: give 'mean', or None for a vector per token")
    card = pipe.model.card
    if pooling == "auto" and card is not None and (card.embedding or card.pooling):
        if truncation or max_length is not None:
            raise InputError("truncation: the model's files say where texts are cut; leave it out")
        options = {"batch_size": pipe.batch_size}
        yield from public("embed")(pipe.model, inputs, pipe.tokenizer, **options)
        return

    def vectors_of(masks: np.ndarray, out: Any) -> list[np.ndarray]:
        states = np.asarray(out.last_hidden_state, np.float32)
        return [x[mask == 1] for x, mask in zip(states, masks, strict=True)]

    for number, text in enumerate(inputs):
        pipe.tokenizer.check_not_blank(text, f"inputs[{number}]")
    encoding = {"truncation": truncation, "max_length": max_length}
    for vectors in _outputs(pipe, inputs, vectors_of, **encoding):
        yield vectors if pooling is None else vectors.mean(0)


@dataclass(frozen=True)
class PipelineTask:
    """A task of `pipeline`: base class of its models, and the function of its inputs."""

    model_class: type
    run: Callable[..., Iterator[Any]]


TASKS: Mapping[str, PipelineTask] = {
    "text-generation": PipelineTask(CausalLM, _text_generation),
    "text2text-generation": PipelineTask(
        EncoderDecoderLM, partial(_text_to_text, "generated_text")
    ),
    "translation": PipelineTask(EncoderDecoderLM, partial(_text_to_text, "translation_text")),
    "text-classification": PipelineTask(SequenceClassifier, _classification),
    "feature-extraction": PipelineTask(BaseModel, _features),
}
