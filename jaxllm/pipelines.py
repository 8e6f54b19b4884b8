"""`pipeline`: strings in, strings, labels or vectors out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from jaxllm.auto import AutoTokenizer
from jaxllm.common.arguments import PIPELINE, checked, checked_list, drop_renamed
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.loading import load
from jaxllm.models.model import Model
from jaxllm.pipeline_tasks import TASKS, Chat, TaskModel, with_task_settings
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.messages import plain_rows


@dataclass(frozen=True, kw_only=True)
class Pipeline(TaskModel):
    """A model and its tokenizer as a function of strings; made by `pipeline`.

    Attributes:
        task: name of the task.
        batch_size: number of inputs of a batch.
        options: options of each call, unless the call has others.
    """

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        inputs: str | Chat | Mapping[str, str] | Sequence[str | Chat | Mapping[str, str]],
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Runs the task for one input, or for each of a list.

        Args:
            inputs: a string or a list of strings; for "text-generation" also the messages of a
                chat, or a list of such conversations; for "text-classification" also a pair
                ``{"text": ..., "text_pair": ...}`` or a list of pairs.
            batch_size: number of inputs of a batch. None: that of the pipeline.
            options: fields of `GenerationConfig` and `key` for generation; `src_lang` and
                `tgt_lang` for translation models ("translation", "text2text-generation");
                `truncation=True` to cut longer texts, or `max_source_length` to cut them to so many
                tokens (tasks that generate);
                `return_full_text=False` for the new text alone ("text-generation"); `top_k=None`
                for the scores of all labels ("text-classification"); `pooling=None` for a vector
                per token ("feature-extraction"); `truncation` and `max_length` of the tokenizer for
                both of these.

        Returns:
            As transformers' pipelines, except for "feature-extraction":

            - "text-generation": a list of ``{"generated_text": text}`` for each input, one for each
              of `num_return_sequences`. For a chat the text is the list of messages with the
              answer.
            - "text2text-generation": the same; for a list of strings with one result each, only
              ``{"generated_text": text}`` for each.
            - "translation": as "text2text-generation", with the key ``"translation_text"``.
            - "text-classification": ``{"label": name, "score": probability}`` for each input; a
              list of them with `top_k=None` or above 1.
            - "feature-extraction": float32 [D] for each input, the mean over its tokens.

            A list for one string, except of "feature-extraction".

        Raises:
            InputError: an option that the task does not take.
        """
        options = {**self.options, **options}
        _check_options(self.task, options)
        pipe = self if batch_size is None else replace(self, batch_size=batch_size)
        takes_pairs = self.task == "text-classification"
        is_pair = takes_pairs and isinstance(inputs, Mapping)
        single = isinstance(inputs, str) or is_pair or (not takes_pairs and _is_chat(inputs))
        rows: list[Any] = [inputs] if single else checked_list(plain_rows(inputs), "inputs")
        if not rows:
            return []
        for i, row in enumerate(rows):
            if takes_pairs and isinstance(row, Mapping):
                if "text" not in row or {*row} - {"text", "text_pair"}:
                    raise InputError(f"inputs[{i}]: expected text and text_pair, found {[*row]}")
                texts = [text for text in row.values() if text is not None]
            else:
                texts = [row] if takes_pairs or not _is_chat(row) else []
            if not all(isinstance(text, str) for text in texts):
                expected = "a string" + takes_pairs * ", or a mapping of text and text_pair"
                raise InputError(f"inputs[{i}]: expected {expected}, found {quoted(row)}")
        results = list(TASKS[self.task].run(pipe, rows, **options))
        if single and not is_pair:
            return results if isinstance(results[0], dict) else results[0]
        flattened = ("text2text-generation", "translation")  # by transformers
        if self.task in flattened and all(len(each) == 1 for each in results):
            return [each[0] for each in results]
        return results[0] if is_pair else results


def pipeline(
    task: str,
    model: Model[Any] | str | PathLike[str],
    tokenizer: Tokenizer | str | PathLike[str] | None = None,
    *,
    batch_size: int = 8,
    **options: Any,
) -> Pipeline:
    """A function of strings, like transformers' `pipeline()`.

    Args:
        task: "text-generation", "text2text-generation", "translation", "text-classification" or
            "feature-extraction", which gives the vectors of `jaxllm.embed` if the model's files say
            how to pool, and else the mean over all tokens of a text, not normalized.
        model: a model, or what `jaxllm.load` takes.
        tokenizer: a tokenizer, or its path or Hub id. None: the model's, if that is a path or id.
        batch_size: number of inputs of a batch.
        options: arguments of `jaxllm.load`, if `model` is a path or a Hub id, and options of each
            call of the pipeline, such as ``max_new_tokens=50``.

    Raises:
        UnsupportedError: another task, or a model of another task.
        InputError: there is no tokenizer, or an option is none of these.
    """
    if checked(task, (str,), "task", "a name") not in TASKS:
        raise UnsupportedError(
            f"task: {quoted(task)}; pipelines have {', '.join(TASKS)} (summaries are"
            " 'text2text-generation'; 'translation_en_to_fr' is 'translation' with src_lang and"
            " tgt_lang, or a T5's prefix in the text; 'sentiment-analysis' is"
            " 'text-classification')"
        )
    model_class = TASKS[task].model_class
    options = drop_renamed("pipeline()", options, PIPELINE)
    arguments = inspect.signature(load).parameters
    load_options = {name: value for name, value in options.items() if name in arguments}
    call_options = {name: value for name, value in options.items() if name not in arguments}
    _check_options(task, call_options)
    if isinstance(tokenizer, str | PathLike):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if isinstance(model, str | PathLike):
        model, own = load(model, **{"architecture": model_class, **load_options})
        tokenizer = own if tokenizer is None else tokenizer
    elif load_options:
        raise InputError(
            f"{', '.join(load_options)}: for a path or Hub id, but the model is loaded"
        )
    if not isinstance(model, model_class):
        raise UnsupportedError(
            f"{task!r} needs a {model_class.__name__}, not a {type(model).__name__}"
        )
    if tokenizer is None:
        raise InputError("tokenizer: give the model's, since the checkpoint has none")
    loaded: Any = model
    loaded, prefix = with_task_settings(task, loaded)
    return Pipeline(
        task=task,
        model=loaded,
        tokenizer=tokenizer,
        prefix=prefix,
        batch_size=batch_size,
        options=call_options,
    )


def _check_options(task: str, options: Mapping[str, Any]) -> None:
    """Raises InputError for options that a call of the task does not take."""
    parameters = inspect.signature(TASKS[task].run).parameters.values()
    names = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    fields = {name: value for name, value in options.items() if name not in names}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        GenerationConfig(**fields)  # names what is wrong
    elif fields:
        raise InputError(
            f"{task!r} does not take {', '.join(sorted(fields))}; its options are"
            f" {', '.join(sorted(names))}"
        )


def _is_chat(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and bool(inputs) and isinstance(inputs[0], Mapping)
