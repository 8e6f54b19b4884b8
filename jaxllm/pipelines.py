"""`pipeline`: strings in, strings, labels or vectors out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxllm.common.arguments import checked_list
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.lengths import with_default_length
from jaxllm.loading import load
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder_only import CausalLM
from jaxllm.models.model import BaseModel, Model, without_metadata
from jaxllm.models.t5 import T5ForConditionalGeneration
from jaxllm.tokenizers import Tokenizer

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages of a conversation: ``{"role": ..., "content": ...}``."""
T = TypeVar("T")
Tokenized: TypeAlias = list[list[int]]


@dataclass(frozen=True)
class Pipeline:
    """A model and its tokenizer as a function of strings; made by `pipeline`.

    Attributes:
        task: name of the task.
        batch_size: number of inputs of a batch.
    """

    task: str
    model: Any
    tokenizer: Tokenizer
    batch_size: int = 8

    def __call__(self, inputs: str | Chat | Sequence[str | Chat], **options: Any) -> Any:
        """Runs the task for one input, or for each of a list.

        Args:
            inputs: a string or a list of strings; for "text-generation" also the messages of a
                chat, or a list of such conversations.
            options: fields of `GenerationConfig` and `key` for generation, and
                `return_full_text=False` for the new text alone ("text-generation"); `top_k=None`
                for the scores of all labels ("text-classification"); `pooling=None` for a vector
                per token ("feature-extraction").

        Returns:
            As transformers' pipelines, except for "feature-extraction":

            - "text-generation": a list of ``{"generated_text": text}`` for each input, one for each
              of `num_return_sequences`. For a chat the text is the list of messages with the
              answer.
            - "text2text-generation": the same; for a list of strings with one result each, only
              ``{"generated_text": text}`` for each.
            - "text-classification": ``{"label": name, "score": probability}`` for each input; a
              list of them with `top_k=None` or above 1.
            - "feature-extraction": float32 [D] for each input, the mean over its tokens.

            A list for one string, except of "feature-extraction".
        """
        single = isinstance(inputs, str) or _is_chat(inputs)
        rows: list[Any] = [inputs] if single else checked_list(inputs, "inputs")
        if not rows:
            return []
        results = list(TASKS[self.task].run(self, rows, **options))
        if single:
            return results if isinstance(results[0], dict) else results[0]
        if self.task == "text2text-generation" and all(len(each) == 1 for each in results):
            return [each[0] for each in results]  # transformers flattens this task alone
        return results


def pipeline(
    task: str,
    model: Model[Any] | str | PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    batch_size: int = 8,
    **options: Any,
) -> Pipeline:
    """A function of strings, like transformers' `pipeline()`.

    Args:
        task: "text-generation", "text2text-generation", "text-classification" or
            "feature-extraction".
        model: a model, or what `jaxllm.load` takes.
        tokenizer: the model's; needed with a model that is loaded already.
        batch_size: number of inputs of a batch.
        options: arguments of `jaxllm.load`, if `model` is a path or a Hub id.

    Raises:
        UnsupportedError: another task, or a model of another task.
        InputError: there is no tokenizer.
    """
    if task not in TASKS:
        raise UnsupportedError(f"task: {task!r}; pipelines have {', '.join(TASKS)}")
    model_class = TASKS[task].model_class
    if isinstance(model, str | PathLike):
        model, own = load(model, **{"architecture": model_class, **options})
        tokenizer = own if tokenizer is None else tokenizer
    elif options:
        raise InputError(f"{', '.join(options)}: for a path or Hub id, but the model is loaded")
    if not isinstance(model, model_class):
        raise UnsupportedError(
            f"{task!r} needs a {model_class.__name__}, not a {type(model).__name__}"
        )
    if tokenizer is None:
        raise InputError("tokenizer: give the model's, since the checkpoint has none")
    return Pipeline(task, model, tokenizer, batch_size)


def _is_chat(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and bool(inputs) and isinstance(inputs[0], Mapping)


def _generate(
    pipe: Pipeline, prompts: Tokenized, key: Any, fields: Mapping[str, Any]
) -> Iterator[list[list[int]]]:
    """Token ids of each prompt's results: prompt and answer, or an encoder-decoder's answer."""
    settings = GenerationConfig(**fields)
    # In the order of the prompts: max_length counts the padding of a batch.
    for first in range(0, len(prompts), pipe.batch_size):
        rows = prompts[first : first + pipe.batch_size]
        batch = pipe.tokenizer.pad(rows, padding_side="left", return_tensors="np")
        width = batch.input_ids.shape[1]
        config = with_default_length(settings, pipe.model, width)
        # Row ids go on from batch to batch, so that rows draw different numbers.
        ids = np.arange(first, first + len(rows))
        out = generate(pipe.model, batch.input_ids, batch.attention_mask, config, key, row_ids=ids)
        results = np.split(np.asarray(out.sequences), len(rows))
        for prompt, sequences in zip(rows, results, strict=True):
            start = 0 if pipe.model.is_encoder_decoder else width - len(prompt)
            yield sequences[:, start:].tolist()


def _text_generation(
    pipe: Pipeline,
    inputs: list[str | Chat],
    *,
    return_full_text: bool = True,
    key: Any = None,
    **fields: Any,
) -> Iterator[list[dict[str, Any]]]:
    tokenizer = pipe.tokenizer

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    prompts = [_prompt_ids(tokenizer, each) for each in inputs]
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


def _prompt_ids(tokenizer: Tokenizer, prompt: str | Chat) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt)


def _text_to_text(
    pipe: Pipeline, inputs: list[str], *, key: Any = None, **fields: Any
) -> Iterator[list[dict[str, str]]]:
    prompts = [pipe.tokenizer.encode(text) for text in inputs]
    for results in _generate(pipe, prompts, key, fields):
        texts = pipe.tokenizer.batch_decode(results, skip_special_tokens=True)
        yield [{"generated_text": text} for text in texts]


@jax.jit
def _forward(model: Any, batch: Mapping[str, Array]) -> Any:
    return model(**batch)


def _outputs(
    pipe: Pipeline, inputs: list[str], rows_of: Callable[[np.ndarray, Any], Sequence[T]]
) -> list[T]:
    """Runs the model on texts.

    Args:
        rows_of: computes the result of each row, from a batch's padding mask and model output.
    """
    model = without_metadata(pipe.model)

    def run(texts: list[str]) -> Sequence[T]:
        batch = pipe.tokenizer(texts, bucket="power_of_two", return_tensors="np")
        return rows_of(np.asarray(batch.attention_mask), _forward(model, dict(batch)))

    results = dict(run_in_batches(run, inputs, pipe.batch_size, length=len))
    return [results[i] for i in range(len(inputs))]


def _classification(pipe: Pipeline, inputs: list[str], *, top_k: int | None = 1) -> Iterator[Any]:
    names, config = label_names(pipe.model), pipe.model.config
    for row in _outputs(
        pipe, inputs, lambda _, out: list(np.asarray(_probabilities(out.logits, config)))
    ):
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
    config = {} if model.origin is None else json.loads(model.origin.config)
    names = config.get("id2label") or {}
    return [names.get(str(i), f"LABEL_{i}") for i in range(model.config.num_labels)]


def _features(
    pipe: Pipeline, inputs: list[str], *, pooling: str | None = "mean"
) -> Iterator[np.ndarray]:
    if pooling not in ("mean", None):
        raise InputError(f"pooling is {pooling!r}: give 'mean', or None for a vector per token")

    def vectors_of(masks: np.ndarray, out: Any) -> list[np.ndarray]:
        states = np.asarray(out.last_hidden_state, np.float32)
        return [x[mask == 1] for x, mask in zip(states, masks, strict=True)]

    for vectors in _outputs(pipe, inputs, vectors_of):
        yield vectors if pooling is None else vectors.mean(0)


@dataclass(frozen=True)
class PipelineTask:
    """A task of `pipeline`: base class of its models, and the function of its inputs."""

    model_class: type
    run: Callable[..., Iterator[Any]]


TASKS: Mapping[str, PipelineTask] = {
    "text-generation": PipelineTask(CausalLM, _text_generation),
    "text2text-generation": PipelineTask(T5ForConditionalGeneration, _text_to_text),
    "text-classification": PipelineTask(SequenceClassifier, _classification),
    "feature-extraction": PipelineTask(BaseModel, _features),
}
