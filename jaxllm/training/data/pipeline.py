"""Makes batches from a `DataConfig`, a tokenizer and the properties of a model.

Batches of preference pairs also have log-probabilities under a reference model, which are computed
once before training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxllm.batch.tables.columns import RowTemplate
from jaxllm.common.errors import ConfigError, DataError, nearest
from jaxllm.models.model import Model
from jaxllm.parallel.placement import put_batch
from jaxllm.parallel.sharding import constrain, use_mesh
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.translation_tokenizers import WithLanguages
from jaxllm.training.data.batches import Batches, EpochBatches, rows_of_process
from jaxllm.training.data.chat_formats import ChatFormat, GeneratedFormat, preference_format
from jaxllm.training.data.config import (
    DataConfig,
    ModelInfo,
    check_together,
    eos_of,
    length_limits,
)
from jaxllm.training.data.examples import (
    EncodingProgress,
    Examples,
    RowEncoder,
    encode_rows,
)
from jaxllm.training.data.formats import (
    ClassificationFormat,
    PromptCompletionFormat,
    Seq2SeqFormat,
    TextFormat,
    labels_of,
)
from jaxllm.training.data.plan import Planner
from jaxllm.training.data.rows import (
    Row,
    Rows,
    SequenceRows,
    TableRows,
    dataset_rows,
    open_rows,
)
from jaxllm.training.data.stream import ALONE, Peers, open_stream
from jaxllm.training.dpo import pair_logps
from jaxllm.training.losses import Batch

CHECKED_ROWS = 100
"""Number of rows, from the first on, whose fields are checked before a model is loaded."""


def rows_of(config: DataConfig, rows: Sequence[Row] | None = None) -> Rows:
    """Opens the data source of a config, or `rows` instead, with the fields of its templates.

    Raises:
        ConfigError: the config has no source, or has one although there are `rows`.
        MissingFileError, DataError, UnsupportedError: as `open_rows` and `dataset_rows`.
        DataError, InputError: a template is wrong, or names a column that the first rows lack.
    """
    templates = {
        name: RowTemplate(text, f"templates.{name}") for name, text in config.templates.items()
    }
    if rows is not None:
        if config.path is not None or config.dataset is not None:
            raise ConfigError("path, dataset: have no effect when rows are given")
        source: Rows = SequenceRows(rows)
    elif config.dataset is not None:
        source = dataset_rows(config.dataset, config.dataset_name, config.split)
    elif config.path is None:
        raise ConfigError("path: give the files of the data, or a dataset")
    else:
        source = open_rows(
            config.path,
            file_type=config.file_type,
            by_line=config.by_line,
            delimiter=config.delimiter,
        )
        if isinstance(source, TableRows):
            used = itertools.chain(*(template.names for template in templates.values()))
            source.check_distinct({*config.fields.values(), *used})
    for index in range(min(len(source), CHECKED_ROWS)) if templates else ():
        for template in templates.values():
            try:
                template.columns(source[index])
            except DataError as failure:
                raise DataError(f"{source.where(index)}: {failure}") from None
    source.templates = templates
    return source


def check_fields(config: DataConfig) -> None:
    """Checks that the first rows have the fields that the format reads, before a model is loaded.

    Raises:
        DataError: there are no rows, or one of them lacks a field; names the nearest.
    """
    rows = rows_of(config)
    if not len(rows):
        raise DataError(f"{rows.name}: has no rows")
    for index in range(min(len(rows), CHECKED_ROWS)):
        row = rows[index]
        for name, field in config.fields.items():
            if field not in row and not (config.format == "preference" and name == "prompt"):
                raise DataError(
                    f"{name}_field: {rows.where(index)} has no field {field!r}; "
                    f"{nearest(field, list(map(str, row)))}"
                )


def make_format(
    config: DataConfig, tokenizer: Tokenizer, model: ModelInfo
) -> TextFormat | ClassificationFormat | GeneratedFormat:
    """Makes the format that encodes the rows of a config for a model.

    Raises:
        ConfigError: the model cannot be trained on it; or truncation would cut off what the
            decoder begins with.
    """
    check_together(config, model)
    match config.format:
        case "classification":
            labels = labels_of(model, config.label_names)
            return ClassificationFormat(tokenizer, config.text_field, config.label_field, labels)
        case "chat":
            return ChatFormat(
                tokenizer,
                model.eos_token_ids,
                config.messages_field,
                config.chat_template,
                config.train_on,
            )
        case "preference":
            return preference_format(config, tokenizer, model)
        case "text":
            return TextFormat(tokenizer, eos_of(tokenizer, model), config.text_field)
        case "prompt_completion":
            eos = eos_of(tokenizer, model)
            return PromptCompletionFormat(
                tokenizer, eos, config.prompt_field, config.completion_field
            )
        case "seq2seq":
            ends_in_code = isinstance(tokenizer, WithLanguages) and not tokenizer.code_comes_first
            if config.on_too_long == "truncate" and ends_in_code:
                raise ConfigError(
                    "on_too_long: 'truncate' would cut off the language code at the end of a "
                    "target; this tokenizer takes 'error' and 'drop'"
                )
            return Seq2SeqFormat(
                tokenizer,
                eos_of(tokenizer, model),
                config.source_field,
                config.target_field,
                config.source_prefix,
                config.src_lang_field,
                config.tgt_lang_field,
            )


def row_encoder(
    config: DataConfig, tokenizer: Tokenizer, model: ModelInfo, rows: Sequence[Row] | None = None
) -> RowEncoder:
    """Makes what encodes the rows of a config's source, or `rows` instead; raises as its parts."""
    encode, limits = make_format(config, tokenizer, model), length_limits(config, model)
    return RowEncoder(rows_of(config, rows), encode, model, limits, config.on_too_long)


def read_examples(
    config: DataConfig,
    tokenizer: Tokenizer,
    model: ModelInfo,
    rows: Sequence[Row] | None = None,
    progress: EncodingProgress = lambda done, total: None,
) -> Examples:
    """Reads and encodes all rows of a config's source, or `rows` instead.

    Args:
        progress: called as ``progress(done, total)`` after every row.

    Raises:
        ConfigError: the config does not fit the model.
        DataError: a file or a row is malformed or does not fit; the message names it.
    """
    return encode_rows(row_encoder(config, tokenizer, model, rows), progress)


def make_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    model: ModelInfo,
    batch_size: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    epochs: int | None = None,
    rows: Sequence[Row] | None = None,
    progress: EncodingProgress = lambda done, total: None,
    peers: Peers = ALONE,
    group_by_length: bool | None = None,
) -> Batches:
    """Makes the batches of a training run.

    Args:
        config: source, format and batching.
        tokenizer: the model's tokenizer.
        model: properties of the model, ``ModelInfo.of(model)``.
        batch_size: rows per step, over all processes.
        seed: seed of the order if the config has none.
        process_index, process_count: selects this process's part of each batch.
        epochs: number of epochs; None: unlimited.
        rows: dicts in place of the config's source.
        progress: called as ``progress(done, total)`` after every encoded row.
        peers: processes among which the encoding of a streamed set is divided.
        group_by_length: see `Planner`; None: as the config's `shuffle`.

    Raises:
        ConfigError, DataError: as `read_examples`.

    >>> from jaxllm.tokenizers.byte_level import byte_tokenizer
    >>> model = ModelInfo(kind="causal", vocab_size=258, context_length=64)
    >>> config = DataConfig(format="prompt_completion", bucket=4)
    >>> rows = [{"prompt": "1+1=", "completion": "2"}]
    >>> batches = make_batches(config, byte_tokenizer(), model=model, batch_size=1, rows=rows)
    >>> next(batches)["labels"][0, :7].tolist()
    [-100, -100, -100, -100, 50, 256, -100]
    """
    process = (process_index, process_count)
    rows_of_process(batch_size, *process)  # raises before rows are read
    encoder = row_encoder(config, tokenizer, model, rows)
    seed = seed if config.seed is None else config.seed
    group = config.shuffle if group_by_length is None else group_by_length
    planner = Planner(
        batch_size, encoder.limits, config.packing, config.bucket, config.shuffle, seed, group
    )
    stream = open_stream(config, tokenizer, encoder, planner, peers)
    source = encode_rows(encoder, progress) if stream is None else stream
    return Batches(source, model, planner, epochs, process)


def epoch_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    model: ModelInfo,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    rows: Sequence[Row] | None = None,
    progress: EncodingProgress = lambda done, total: None,
    peers: Peers = ALONE,
) -> EpochBatches:
    """Makes batches for evaluation: every example exactly once, in a fixed order.

    The last batch is filled with padding rows: labels are -100, or `weights` 0 for float
    labels. The result can be iterated over repeatedly. Arguments are those of `make_batches`.
    """
    return make_batches(
        config,
        tokenizer,
        model=model,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
        rows=rows,
        progress=progress,
        peers=peers,
    ).in_order(batch_size)


def reference_logps(
    model: Model[Any],
    epoch: EpochBatches,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float32[np.ndarray, "N 2"]:
    """Log-probabilities of all pairs under a model without dropout, in the order of the examples;
    of a stream, in the order of the rows.

    Args:
        model: the reference: the model before training. With LoRA, the base model.
        epoch: every pair once, such as those of `Batches.in_order`.
        mesh: devices of the model; None: one device.
        progress: called as ``progress(done, total)`` after every batch.
    """
    total = epoch.examples.total
    result = np.zeros((total, 2), np.float32)
    several = mesh if mesh is not None and mesh.size > 1 else None
    done = 0
    for part in epoch.windows():
        places = part.examples.places
        for members, batch in zip(part.members, part, strict=True):
            with use_mesh(several):
                logps = _pair_logps(model, batch if mesh is None else put_batch(batch, mesh))
            numbers = members if places is None else places[members, 0]
            result[numbers] = np.asarray(logps)[: len(members)]
            done += len(members)
            progress(done, total)
    return result


@jax.jit
def _pair_logps(model: Model[Any], batch: Batch) -> Float[Array, "B 2"]:
    # Replicated, so that every process has the rows of all.
    return constrain(pair_logps(model, batch)[0])


def add_reference(batches: Batches, model: Model[Any], batch_size: int = 8) -> Batches:
    """The batches with `reference_logps`, computed with the model before training.

    Args:
        batches: of format "preference", on one process.
        model: the reference; with LoRA, the base model.
        batch_size: pairs per batch of this computation.
    """
    logps = reference_logps(model, batches.in_order(batch_size))
    return batches.with_examples(batches.examples.with_reference(logps))
