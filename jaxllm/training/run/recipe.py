"""`Recipe`: the configuration of a training run, read strictly from YAML as in configs/.

A recipe that comes with the package is unpacked into the cache folder with its data when it is run
by its name. There it can be read and copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import runpy
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

import jaxllm
from jaxllm.batch.tables.columns import template_text
from jaxllm.checkpoint.load import read_config_file
from jaxllm.common.compiling import cache_folder
from jaxllm.common.errors import (
    ConfigError,
    JaxLLMError,
    MissingFileError,
    RunError,
    naming_file,
)
from jaxllm.common.files import read_text, write_whole
from jaxllm.common.spelling import closest
from jaxllm.common.validation import admits_null, from_plain
from jaxllm.training.data import DataConfig
from jaxllm.training.dpo import DPOConfig
from jaxllm.training.evaluation import check_metrics
from jaxllm.training.lora import LoraConfig
from jaxllm.training.losses import TokenLoss
from jaxllm.training.optimizers import OptimizerConfig

Dtype = Literal["float32", "bfloat16", "float16"]
BYTES = "bytes"
CHANGEABLE = (
    *("output_dir", "max_steps", "epochs", "eval_data", "evaluation", "early_stopping"),
    *("checkpoints.every", "checkpoints.keep", "mesh", "log_every", "tensorboard", "wandb"),
    "skip_limit",
    *("model.path", "data.path", "data.dataset"),  # digests of their contents are compared
    "data.streaming",  # as is the way in which the data are read
)
"""Fields that may change when a run resumes. The others determine the weights or the best
checkpoint."""
PACKAGE = Path(jaxllm.__file__).parent
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "configs")
"""Folder of the recipes in an installed package, and in a clone of the repository."""
DATA_SCRIPT = "make_data.py"
DEFAULT_STEPS = 1000
RULES = 2
"""Version of the rules of a run, which its checkpoints name; without a name it is 1. A run resumes
with its own. Since 2, layers of one matrix share LoRA's A, `data.shuffle: false` keeps the order of
the files, and `epochs` round up."""
MAX_FILE_BYTES = 1 << 20
TAG = "tag:yaml.org,2002:"
PATHS = {
    "data": ("path", "dataset", "templates"),
    "eval_data": ("path", "dataset", "templates"),
    "model": ("path", "tokenizer", "config"),
}
"""Fields of a recipe that may be paths."""
KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
# PyYAML's errors, and those of Python's constructors for values that contradict their tags.
NOT_YAML = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError)


def at_least(minimum: float, section: object, *names: str) -> None:
    """Checks that fields are None, or not below a minimum."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name}: expected {minimum} or more, found {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model that the run starts from, and its tokenizer.

    Args:
        path: a Hugging Face folder, a .gguf file, a Hub id, or "smollm2" (the bundled model).
        config: fields of config.json, or the path of one, in place of `path`: a new model with
            random weights.
        architecture: class name that replaces the one in the config.
        num_labels: make a classifier with this many outputs from the language model at `path`.
        problem_type: problem type of that classifier; None: single label, or regression for one
            output.
        overrides: fields of the checkpoint's config to change, such as dropout rates.
        tokenizer: a folder or Hub id, "smollm2", or "bytes" (ids are bytes; for new models). None:
            the model's tokenizer.
        dtype: compute dtype; None: as `jaxllm.load` chooses. Trained parameters are
            float32.
        matmul_precision: precision of products in float32 on a TPU or GPU: default (the fastest),
            high or highest; None: highest.
        remat: recompute activations in the backward pass, to save memory: true or full, all of
            them; dots, all but the results of linear layers.
        scan_layers: run equal layers in a scan, so that a deep model compiles faster.
        attn_implementation: auto, eager, blockwise, splash, triton, xla or cudnn; see
            docs/models.md.
    """

    path: str | None = None
    config: Mapping[str, Any] | str | None = None
    architecture: str | None = None
    num_labels: int | None = None
    problem_type: str | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None
    dtype: Dtype | None = None
    matmul_precision: Literal["default", "high", "highest"] | None = None
    remat: bool | Literal["full", "dots"] = False
    scan_layers: bool = False
    attn_implementation: Literal[
        "auto", "eager", "blockwise", "splash", "triton", "xla", "cudnn"
    ] = "auto"

    def __post_init__(self):
        if (self.path is None) == (self.config is None):
            raise ConfigError("path, config: give exactly one of the two")
        if isinstance(self.config, str):
            try:
                config = read_config_file(Path(self.config))
            except JaxLLMError as error:
                raise ConfigError(f"config: {error}") from None
            object.__setattr__(self, "config", config)
        if self.config is not None:
            for name in ("num_labels", "problem_type", "overrides"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: has no effect on a new model; set it in config")
            if self.tokenizer is None:
                raise ConfigError('tokenizer: required for a new model, such as "bytes"')
        if self.problem_type is not None and self.num_labels is None:
            raise ConfigError("problem_type: has no effect without num_labels")
        at_least(1, self, "num_labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation on all of `eval_data`.

    Args:
        every: steps between evaluations. The last step is always evaluated; None: only the last.
        at_start: also evaluate before the first step; logged in metrics.jsonl as step 0.
        batch_size: rows per batch; None: as in a training micro-batch.
        metrics: metrics of generated answers: exact_match, normalized_exact_match, rouge and
            rouge_lsum (0 to 1; rouge_stemmed and rouge_lsum_stemmed without the endings of English
            words), bleu and chrf (0 to 100). Empty: nothing is generated.
        rows: number of rows to generate for; None: all.
        samples: number of answers in the report, before and after training.
        fields: generation settings of `jaxllm.generate`, such as ``{max_new_tokens: 64}``.
    """

    every: int | None = None
    at_start: bool = False
    batch_size: int | None = None
    metrics: tuple[str, ...] = ()
    rows: int | None = None
    samples: int = 5
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        at_least(1, self, "every", "batch_size", "rows")
        at_least(0, self, "samples")
        check_metrics(self.metrics)
        if not self.metrics and (self.fields or self.rows or self.samples != Evaluation.samples):
            raise ConfigError("fields, rows, samples: have no effect without metrics")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoint settings: how often to save, and which to keep.

    Args:
        every: steps between checkpoints. The last step and the best evaluation are saved as well.
        keep: number of latest checkpoints to keep, in addition to the best one.
        metric: evaluation metric that selects the best checkpoint.
        mode: min or max: the smallest or the largest value is the best.
    """

    every: int = 500
    keep: int = 2
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self):
        at_least(1, self, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends the run when its evaluations (`evaluation.every`) no longer improve.

    Args:
        patience: number of evaluations in a row without an improvement that ends the run.
        metric: evaluation metric to watch. None: `checkpoints.metric`.
        min_delta: smallest change that is more than no improvement.
        min_delta_from: last_improvement: the change since the last value that was an improvement;
            best: since the best value, as transformers' ``early_stopping_threshold``.
    """

    patience: int = 3
    metric: str | None = None
    min_delta: float = 0.0
    min_delta_from: Literal["last_improvement", "best"] = "last_improvement"

    def __post_init__(self):
        at_least(1, self, "patience")
        at_least(0, self, "min_delta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Number of devices along each mesh axis; `data` -1: all remaining
    devices. See docs/devices.md."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    Args:
        model, data, optimizer, lora, dpo, evaluation, early_stopping, checkpoints, mesh: see their
            classes.
        eval_data: evaluation data. None: no evaluation; as an override (``--eval-data null``) it
            also drops the file's `evaluation` and `early_stopping`.
        output_dir: folder of the run.
        max_steps: last step. None: 1000, or the end of the last epoch.
        epochs: passes over the data, such as 3 or 0.5, in place of `max_steps`; a part of a step
            is a step. Those before a resume count too.
        batch_size: rows of one optimizer step, over all devices and micro-batches.
        accumulation: number of micro-batches of a step, computed sequentially.
        seed: seed of random weights, data order and dropout.
        trainable: regexes of the paths of the parameters to train; empty: all parameters.
        label_smoothing, z_loss: see `jaxllm.training.losses.TokenLoss`; evaluations leave both out.
        ema_decay: decay of a moving average of the weights, which is evaluated and exported. None:
            no average.
        skip_limit: number of consecutive batches without a finite gradient that stops the run.
        log_every: steps between progress lines without a terminal; there is at least one line every
            ten seconds.
        tensorboard: write event files; needs the extra `tensorboard`.
        wandb: project on Weights & Biases to log to; needs the extra `wandb`.
    """

    model: ModelSource
    data: DataConfig
    eval_data: DataConfig | None = None
    output_dir: str | None = None
    max_steps: int | None = None
    epochs: float | None = None
    batch_size: int = 8
    accumulation: int = 1
    seed: int = 0
    trainable: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    dpo: DPOConfig | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ema_decay: float | None = None
    skip_limit: int = 10
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    early_stopping: EarlyStopping | None = None
    checkpoints: Checkpoints = dataclasses.field(default_factory=Checkpoints)
    mesh: MeshSizes = dataclasses.field(default_factory=MeshSizes)
    log_every: int = 10
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self):
        at_least(1, self, "max_steps", "batch_size", "accumulation", "skip_limit", "log_every")
        if self.epochs is not None:
            if self.max_steps is not None:
                raise ConfigError("epochs cannot be combined with max_steps; remove one of them")
            if not self.epochs > 0:
                raise ConfigError(f"epochs: expected more than 0, found {self.epochs}")
        if self.output_dir == "":
            raise ConfigError("output_dir: expected a folder, found an empty text")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed: expected 0 to {2**32 - 1}, found {self.seed}")
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"accumulation: {self.accumulation} does not divide batch_size, {self.batch_size}"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay: expected 0 to 1, found {self.ema_decay}")
        if self.lora is not None and self.trainable:
            raise ConfigError("trainable: LoRA trains its adapters; use lora.modules_to_save")
        TokenLoss(self.label_smoothing, self.z_loss)  # raises what it raises
        self._check_preferences()
        for pattern in self.trainable:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"trainable: {pattern!r} is not a regex: {error}") from None
        if self.eval_data is None:
            best = (self.checkpoints.metric, self.checkpoints.mode)
            if self.early_stopping is not None:
                raise ConfigError("early_stopping: has no effect without eval_data")
            if self.evaluation != Evaluation():
                raise ConfigError("evaluation: has no effect without eval_data")
            if best != (Checkpoints.metric, Checkpoints.mode):
                raise ConfigError("checkpoints.metric, mode: have no effect without eval_data")

        if self.early_stopping is not None and self.evaluation.every is None:
            raise ConfigError("early_stopping: has no effect without evaluation.every")

    def last_step(self, steps_per_epoch: int, rules: int = RULES) -> int:
        """The step at which the run ends."""
        if self.epochs is not None:
            steps = self.epochs * steps_per_epoch
            return max(1, round(steps) if rules < 2 else math.ceil(steps))
        return DEFAULT_STEPS if self.max_steps is None else self.max_steps

    def _check_preferences(self) -> None:
        for name in ("data", "eval_data"):
            data = getattr(self, name)
            if data is None or (data.format == "preference") == (self.dpo is not None):
                continue
            if self.dpo is None:
                raise ConfigError(
                    f"dpo: required by {name}.format 'preference'; `dpo: {{}}` has the defaults"
                )
            raise ConfigError(
                f"{name}.format: {data.format!r}, but DPO (the section dpo) compares rows of "
                "format 'preference'"
            )
        if self.dpo is not None and (self.label_smoothing or self.z_loss):
            raise ConfigError("label_smoothing, z_loss: have no effect on DPO; see dpo")


def read_recipe(
    path: Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """Reads a recipe from its file, or from its fields.

    `overrides` replace fields under dotted names (``optimizer.name``).

    Paths of data and models in the file are relative to its folder, those in `overrides` and
    `output_dir` to the working directory.

    An override of `epochs` replaces the file's `max_steps`, and the other way round.

    An override null drops a section or field of the file that cannot be null, so that it has its
    default. ``eval_data: null`` switches evaluation off: the file's `evaluation`, `early_stopping`
    and the metric of its `checkpoints` have no effect then.

    Raises:
        MissingFileError: the file does not exist.
        ConfigError: the file is not YAML, or a field is unknown, missing or wrong.
    """
    is_file = isinstance(path, Path)
    raw = with_paths_from(path.parent, read_yaml(path)) if is_file else dict(path)
    if overrides is not None and overrides.get("eval_data", raw) is None:
        raw.pop("evaluation", None)
        raw.pop("early_stopping", None)
        if isinstance(checkpoints := raw.get("checkpoints"), dict):
            raw["checkpoints"] = {
                name: value for name, value in checkpoints.items() if name not in ("metric", "mode")
            }
    for name, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if name in (overrides or {}):
            raw.pop(other, None)
    for name, value in (overrides or {}).items():
        section, last = raw, name.rpartition(".")[2]
        for parent in name.split(".")[:-1]:
            inner = section.get(parent)
            section[parent] = section = dict(inner) if isinstance(inner, Mapping) else {}
        section[last] = value
        if value is None and not admits_null(Recipe, name):
            del section[last]
    for section in ("data", "eval_data"):
        data = raw.get(section)
        templates = data.get("templates") if isinstance(data, dict) else None
        if isinstance(templates, dict):  # the texts of files, by which a resumed run is the same
            for name, text in templates.items():
                templates[name] = template_text(text) if isinstance(text, str) else text
    try:
        return from_plain(Recipe, raw)
    except ConfigError as error:
        options = ", ".join(f"--{name}" for name in overrides or {})
        source = f"{path} (with {options})" if options else str(path)
        raise ConfigError(f"{source if is_file else 'recipe'}: {error}") from None


def with_paths_from(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe, with its relative paths joined to the recipe's folder.

    Names that may be Hub ids are paths only where the folder holds them.

    >>> with_paths_from(Path("configs"), {"data": {"path": "data/*.jsonl"}, "max_steps": 3})
    {'data': {'path': 'configs/data/*.jsonl'}, 'max_steps': 3}
    """

    def joined(section: str, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [joined(section, name, each) for each in value]
        if name == "templates" and isinstance(value, dict):
            return {key: joined(section, key, each) for key, each in value.items()}
        if not isinstance(value, str) or value.startswith("~"):
            return value
        path = folder / value
        is_data = name == "path" and section != "model"
        return str(path) if is_data or os.path.lexists(path) else value

    found = dict(raw)
    for section, names in PATHS.items():
        if isinstance(fields := found.get(section), dict):
            found[section] = fields | {
                n: joined(section, n, fields[n]) for n in names if n in fields
            }
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the fields of a YAML file."""
    with naming_file(path, ConfigError, "read"):
        is_missing = not path.exists()
    if is_missing:
        beside = (other.name for other in path.parent.glob("*"))
        near = closest(path.name, beside)
        hint = f"; is it {path.with_name(near)}?" if near else ""
        raise MissingFileError(f"{path}: no such file{hint}")
    text = read_text(path, max_bytes=MAX_FILE_BYTES, error=ConfigError)
    try:
        raw = yaml.load(text, Loader=StrictLoader)
    except NOT_YAML as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected fields and their values")
    return raw


class StrictLoader(yaml.SafeLoader):
    """SafeLoader restricted to JSON values: no dates, aliases, merge keys or infinite numbers.

    A duplicate field is an error, and 1e-4 is a number.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Nested aliases can expand a few lines to many gigabytes.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"*{event.anchor}: aliases are not read (line {line})")
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.removeprefix(TAG) not in KINDS:
            raise yaml.YAMLError(f"{node.tag}: not a value that JSON has (line {line_of(node)})")
        value = super().construct_object(node, deep)
        if isinstance(value, float) and not math.isfinite(value):
            raise yaml.YAMLError(f"{node.value}: expected a finite number (line {line_of(node)})")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.YAMLError(f"field {name!r}: expected a name (line {line_of(key)})")
            if name in seen:
                raise yaml.YAMLError(f"field {name!r} is there twice (line {line_of(key)})")
            seen.add(name)
        return super().construct_mapping(node, deep)


def line_of(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def parse_yaml(text: str) -> Any:
    """Parses a command-line value as YAML; text that is not YAML is a string.

    >>> [parse_yaml(text) for text in ("3", "1e-4", "null", "[a, b]", "data/*.jsonl")]
    [3, 0.0001, None, ['a', 'b'], 'data/*.jsonl']
    """
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except NOT_YAML:
        return text
    return text if value is None and text.strip() not in ("null", "~", "none", "None") else value


# YAML 1.1, which PyYAML follows, has no number "1e-4".
StrictLoader.add_implicit_resolver(
    TAG + "float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name: ``jaxllm train smollm2_lora_chat``.

    They are the files of ``configs/`` in the repository. A wheel holds copies under
    ``jaxllm/recipes``.

    >>> sorted(recipes())[:2]
    ['gpt2_bytes', 'llama_classification']
    """
    for folder in FOLDERS:
        if (folder / DATA_SCRIPT).is_file():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def description(recipe: Path) -> str:
    """The first sentence of a recipe's comment, for a list."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# ") for line in lines if not line.startswith("# yaml-"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or the name of a recipe that comes with the package.

    The latter is unpacked with its data, if it is not yet.

    Raises:
        MissingFileError: there is neither.
        RunError: the cache folder cannot be written.
    """
    path = Path(os.path.expanduser(name))
    if os.path.lexists(path) or path.suffix or path.name != name:
        return path
    known = recipes()
    if name in known:
        return _unpacked(known[name])
    near = closest(name, known)
    hint = f"; is it {near}?" if near else ""
    raise MissingFileError(
        f"{name}: no such file, and no recipe of this name{hint} (`jaxllm train --list` names all)"
    )


def _unpacked(recipe: Path) -> Path:
    """A copy of the recipe in the cache folder, beside its data."""
    script = recipe.with_name(DATA_SCRIPT)
    version = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / "recipes" / version
    copy, data = folder / recipe.name, folder / "data"
    with naming_file(folder, RunError, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(copy, recipe.read_bytes())
        if not data.is_dir():
            with tempfile.TemporaryDirectory(dir=folder) as partial:
                runpy.run_path(str(script))["write_data"](Path(partial) / "data")
                try:
                    (Path(partial) / "data").rename(data)
                except OSError:
                    if not data.is_dir():  # otherwise another process was faster
                        raise
    return copy
