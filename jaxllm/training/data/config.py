"""`DataConfig`: source, format and batching of the data. `ModelInfo`: the model's properties."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from jaxllm.batch.tables.table import checked_delimiter
from jaxllm.common.errors import ConfigError, InputError, UnsupportedError
from jaxllm.common.validation import check_types
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier
from jaxllm.models.model import Model
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.batch import Bucket
from jaxllm.training.data.rows import FileType

FormatName = Literal["text", "prompt_completion", "chat", "seq2seq", "classification", "preference"]
ModelKind = Literal["causal", "seq2seq", "classification"]
OnTooLong = Literal["error", "truncate", "drop", "split"]

KINDS_OF: Mapping[str, tuple[ModelKind, ...]] = {
    "text": ("causal",),
    "prompt_completion": ("causal",),
    "chat": ("causal",),
    "seq2seq": ("seq2seq",),
    "classification": ("classification",),
    "preference": ("causal", "seq2seq"),
}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
    "seq2seq": ("source", "target"),
    "classification": ("text", "label"),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Fields of a row that each format reads; `NAME_field` has the name of the field NAME."""
_READ_BY: Mapping[str, tuple[str, ...]] = {
    **{
        f"{name}_field": tuple(each for each, names in _FIELDS.items() if name in names)
        for name in itertools.chain(*_FIELDS.values())
    },
    "chat_template": ("chat", "preference"),
    "train_on": ("chat",),
    **dict.fromkeys(("src_lang_field", "tgt_lang_field", "source_prefix"), ("seq2seq",)),
    "max_target_length": ("seq2seq", "preference"),
    "label_names": ("classification",),
}
"""Formats that read each format-specific field."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source and format of the rows, and the shape of batches.

    Args:
        path: JSONL, JSON, CSV, TSV, Parquet, text or byte files: one, a glob, or a list of them.
        file_type: `auto` decides by the suffix.
        by_line: each line of a text file is a row.
        delimiter: the character between the cells of CSV files, such as ";"; None: a comma.
        dataset, dataset_name, split: a Hugging Face data set in place of `path`: a Hub id, a
            folder of CSV or Parquet files, or one that `save_to_disk` wrote; needs the extra
            `datasets`.
        format: how a row becomes an example; see docs/finetuning-data.md.
        text_field, prompt_field, completion_field, chosen_field, rejected_field, messages_field:
            names of the fields in the rows.
        source_field, target_field, label_field, src_lang_field, tgt_lang_field: likewise.
        templates: Jinja templates that make fields of other fields or columns; in a recipe also
            files that hold one.
        source_prefix: prepended to every source, such as ``"summarize: "``.
        chat_template: Jinja source, or the name of one of the tokenizer's templates; None: the
            tokenizer's default.
        train_on: compute the loss on all assistant messages, or on the last one of each
            conversation.
        label_names: class names in the order of class numbers.
        max_length: maximum tokens of an example (of the source, for seq2seq), and length of packed
            rows. None: the model's context length.
        max_target_length: maximum tokens of a seq2seq target, or of T5's preferred and rejected
            answers. None: `max_length`.
        on_too_long: handling of longer examples: error, truncate (at the end), drop, or split into
            several (`text` only). The run prints how many.
        packing: put several examples into a row; they do not attend to each other.
        bucket: round the lengths of unpacked batches up to a power of two, or to a multiple of
            this number; None: to `max_length`. Each length is compiled once.
        shuffle: use a new order in every epoch; false: the order of the files.
        seed: seed of the shuffling; None: the seed of the run.
        streaming: read and encode the rows again in every epoch instead of keeping them in memory.
            None: if there are more than a million rows or 256 MiB of files.

    Raises:
        ConfigError: a field has a wrong type or value, or no effect with the other fields.
    """

    format: FormatName
    path: str | tuple[str, ...] | None = None
    file_type: FileType = "auto"
    by_line: bool = False
    delimiter: str | None = None
    dataset: str | None = None
    dataset_name: str | None = None
    split: str = "train"
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    messages_field: str = "messages"
    source_field: str = "source"
    target_field: str = "target"
    label_field: str = "label"
    src_lang_field: str = "src_lang"
    tgt_lang_field: str = "tgt_lang"
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    source_prefix: str = ""
    chat_template: str | None = None
    train_on: Literal["all", "last"] = "all"
    label_names: tuple[str, ...] = ()
    max_length: int | None = None
    max_target_length: int | None = None
    on_too_long: OnTooLong = "error"
    packing: bool = False
    bucket: Bucket = "power_of_two"
    shuffle: bool = True
    seed: int | None = None
    streaming: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))
        if isinstance(self.label_names, list):
            object.__setattr__(self, "label_names", tuple(self.label_names))
        check_types(self)
        for field in dataclasses.fields(self):
            formats = _READ_BY.get(field.name)
            used = field.default is not MISSING and getattr(self, field.name) != field.default
            if formats and self.format not in formats and used:
                raise ConfigError(
                    f"{field.name}: has no effect with format {self.format!r}; it is read by "
                    f"{', '.join(formats)}"
                )
        self._check_templates()
        self._check_values()

    @property
    def fields(self) -> dict[str, str]:
        """Names of the fields in the rows, by the name that the format has for them."""
        return {name: getattr(self, f"{name}_field") for name in _FIELDS[self.format]}

    def _check_templates(self) -> None:
        for name in self.templates:
            if name not in self.fields or name == "messages":
                raise ConfigError(
                    f"templates.{name}: format {self.format!r} makes no example of it; it reads "
                    f"{', '.join(self.fields)}"
                )
            if self.fields[name] != name:
                raise ConfigError(f"templates.{name}: cannot be combined with {name}_field")

    def _check_values(self) -> None:
        try:
            object.__setattr__(self, "delimiter", checked_delimiter(self.delimiter))
        except InputError as failure:
            raise ConfigError(str(failure)) from None
        for name in ("max_length", "max_target_length", "bucket"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name}: expected 1 or more, found {value}")
        if self.max_length is not None and self.max_length < 2 and self.on_too_long == "split":
            raise ConfigError("max_length: 'split' makes pieces of at least 2 tokens, found 1")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed: expected 0 or more, found {self.seed}")
        if self.path is not None and self.dataset is not None:
            raise ConfigError("path, dataset: give one of the two")
        for other, names in (
            ("dataset", ("file_type", "by_line", "delimiter")),
            ("path", ("dataset_name", "split")),
        ):
            for name in names if getattr(self, other) is not None else ():
                if getattr(self, name) != getattr(DataConfig, name):
                    raise ConfigError(f"{name}: has no effect with {other}")
        if len(set(self.label_names)) != len(self.label_names):
            raise ConfigError(f"label_names: a name is listed twice in {list(self.label_names)}")
        if self.on_too_long == "split" and self.format != "text":
            raise ConfigError(
                f"on_too_long: 'split' is for format 'text'; {self.format!r} has 'error', "
                "'truncate' and 'drop'"
            )
        if self.packing and self.format == "classification":
            raise ConfigError(
                "packing: a classifier predicts one label per row, so its rows cannot be packed"
            )
        if self.packing and self.format == "preference":
            raise ConfigError(
                "packing: rows of format 'preference' are pairs of answers, which are compared as "
                "wholes and cannot be packed; leave it out"
            )
        if self.packing and self.bucket != "power_of_two":
            raise ConfigError("bucket: has no effect with packing; packed rows are max_length long")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The properties of a model that the data depend on.

    Args:
        kind: causal, seq2seq or classification.
        vocab_size: token ids must be below this.
        context_length: maximum tokens of an example; None: no limit.
        eos_token_ids: the first one ends an answer if the tokenizer has no EOS. The ids of the
            config come before the ids of the generation config.
        pad_token_id: id of padding; None: 0, which the masks hide.
        num_labels, problem_type: settings of a classifier, as in config.json.
    """

    kind: ModelKind
    vocab_size: int
    context_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_labels: int = 2
    problem_type: str | None = None

    @classmethod
    def of(cls, model: Model[Any]) -> ModelInfo:
        """Reads the properties of a model.

        Raises:
            UnsupportedError: the model has no labels, such as an encoder alone.
        """
        config = model.config
        kind: ModelKind
        if isinstance(model, SequenceClassifier):
            kind = "classification"
        elif isinstance(model, CausalLM):
            kind = "causal"
        elif model.is_encoder_decoder:
            kind = "seq2seq"
        else:
            raise UnsupportedError(f"{type(model).__name__}: has no labels to predict")
        context = config.max_positions
        if context is None:
            context = getattr(config, "max_position_embeddings", None)
        ends = getattr(model.generation_config, "eos_token_id", None) or ()
        ends = (ends,) if isinstance(ends, int) else tuple(ends)
        return cls(
            kind=kind,
            vocab_size=config.vocab_size,
            context_length=context,
            eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)),
            pad_token_id=config.pad_token_id,
            num_labels=config.num_labels,
            problem_type=config.problem_type,
        )


def check_together(config: DataConfig, model: ModelInfo) -> None:
    """Checks that the model can be trained on the format.

    Raises:
        ConfigError: the model cannot be trained on it.
    """
    kinds = KINDS_OF[config.format]
    if model.kind not in kinds:
        fitting = [name for name, others in KINDS_OF.items() if model.kind in others]
        raise ConfigError(
            f"format: {config.format!r} trains a {' or '.join(kinds)} model, and this is a "
            f"{model.kind} one, which takes {', '.join(fitting)}"
        )
    if config.max_target_length is not None and model.kind != "seq2seq":
        raise ConfigError(
            f"max_target_length: has no effect on a {model.kind} model; max_length is that of "
            "prompt and answer"
        )


def length_limits(config: DataConfig, model: ModelInfo) -> tuple[int, ...]:
    """Maximum number of tokens of an example: (length,), or (source, target) for seq2seq.

    Raises:
        ConfigError: a length exceeds the model's context length, or no length is known.
    """
    length = config.max_length if config.max_length is not None else model.context_length
    if length is None:
        raise ConfigError("max_length: required, since the model's config has no context length")
    target = config.max_target_length if config.max_target_length is not None else length
    limits = (length, target) if model.kind == "seq2seq" else (length,)
    if model.context_length is not None and max(limits) > model.context_length:
        raise ConfigError(
            f"max_length: {max(limits)} tokens, but the model's context has {model.context_length}"
        )
    return limits


def eos_of(tokenizer: Tokenizer, model: ModelInfo) -> int:
    """Id of the token that ends an answer.

    Raises:
        ConfigError: neither tokenizer nor model has one.
    """
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    if model.eos_token_ids:
        return model.eos_token_ids[0]
    raise ConfigError("eos_token_id: neither the tokenizer nor the model's config has one")
