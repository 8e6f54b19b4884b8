"""Reads PEFT's adapter_config.json: a field is used, is known to be inert, or raises."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.common.config_keys import describe_keys, unknown_keys
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.common.strict_json import read_json
from jaxllm.models.config_checks import check_rate, check_size, coerce

MAX_CONFIG_BYTES = 4 * 2**20
CLASSIFIER_NAMES = ("classifier", "score")  # PEFT adds both to each classifier's modules_to_save

# Fields of initialisation and training, beside those of `common.config_keys`: they do not change
# the adapter's output. fan_in_fan_out says how the *base* weight is stored, which the model knows.
# fmt: off
INERT_ADAPTER_KEYS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_ga_config", "megatron_core", "merge_weights", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
    # ms-swift's: dtype in training, and the learning rates of LoRA+.
    "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio",
})
OFF_ADAPTER_KEYS = frozenset({
    "alora_invocation_tokens", "arrow_config", "enable_lora", "ensure_weight_tying", "kasa_config",
    "layer_replication", "loftq_config", "lora_bias", "megatron_config", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_merged_linear",
    "use_qa_lora", "use_qalora", "velora_config",
})
"""Fields that change no result while they are false or empty."""
# fmt: on
# Fields that may exclude some of the targets.
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
# Initialisations that leave the base weights alone; the others (PiSSA, OLoRA, ...) change them.
KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
# Allowed patterns of rank_pattern and alpha_pattern: they match in linear time.
PLAIN_PATTERN = re.compile(r"\^?[\w.\\-]+\$?")


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """Fields of adapter_config.json that have an effect, under PEFT's names."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    task_type: str | None = None
    target_modules: tuple[str, ...] | str = ()
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: int | tuple[int, ...] | None = None
    base: str | None = None
    """base_model_name_or_path, for messages."""
    narrowed: bool = False
    """True if exclude_modules or layers_to_transform may exclude some of the targets."""

    def rank_of(self, module: str) -> int:
        return match_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        return match_pattern(self.alpha_pattern, module, self.lora_alpha)

    def covers_layer(self, module: str) -> bool:
        """True unless `layers_to_transform` excludes the numbered layer of a module."""
        number = re.match(r".*\.[^.]*\.(\d+)\.", module)  # PEFT's expression
        if self.layers_to_transform in (None, ()) or number is None:
            return True
        layers = self.layers_to_transform
        return int(number[1]) in ((layers,) if isinstance(layers, int) else layers)

    def targets(self, module: str) -> bool:
        """True if target_modules, a list, names this module (by its Hugging Face name)."""
        return any(module == t or module.endswith(f".{t}") for t in self.target_modules)


def match_pattern(patterns: Mapping[str, Any], module: str, default: object) -> Any:
    """Value of the first pattern that matches the name or its end, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(path: Path, overrides: Mapping[str, Any] | None = None) -> PeftConfig:
    """Reads an adapter_config.json; `overrides` replace its fields."""
    raw = read_json(path, max_bytes=MAX_CONFIG_BYTES, error=ConfigError)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object")
    try:
        return parse_peft_config({**raw, **(overrides or {})})
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from None


def parse_peft_config(raw: Mapping[str, Any]) -> PeftConfig:
    """`read_peft_config` for the parsed JSON."""
    check_kind(raw)
    hints = typing.get_type_hints(PeftConfig)
    fields = hints.keys() - {"base", "narrowed"}
    known = {*fields, *INERT_ADAPTER_KEYS, *NARROWING, "peft_type", "bias", "init_lora_weights"}
    unknown = unknown_keys(raw, known, OFF_ADAPTER_KEYS)
    if unknown:
        raise UnsupportedError(
            f"{describe_keys(unknown)}: not implemented. To ignore a field all the same: "
            'load_adapter(..., config={"KEY": None})'
        )
    if raw.get("layers_pattern"):  # names the numbers that count; not followed here
        fields -= {"layers_to_transform"}
    present = {name: raw[name] for name in sorted(fields) if raw.get(name) is not None}
    values: dict[str, Any] = {
        name: check_patterns(name, value)
        if name in ("rank_pattern", "alpha_pattern")
        else coerce(name, value, hints[name])
        for name, value in present.items()
    }
    base = raw.get("base_model_name_or_path")
    config = PeftConfig(
        **values,
        base=base if isinstance(base, str) else None,
        narrowed=any(raw.get(n) not in (None, "", []) for n in NARROWING),
    )
    check_size(config, "r")
    check_rate(config, "lora_dropout")
    if not config.target_modules:
        raise ConfigError("target_modules: missing or empty; it names the layers with LoRA")
    if not all(config.modules_to_save):
        raise ConfigError("modules_to_save: expected a list of module names, found an empty one")
    return config


def check_kind(raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedError unless the adapter is plain LoRA of PEFT."""
    if "fine_tune_type" in raw or "lora_parameters" in raw:
        raise UnsupportedError(
            "fine_tune_type, lora_parameters: an adapter of MLX, which PEFT cannot read either; "
            "fuse it into the model with `mlx_lm.fuse`, and load the result"
        )
    if raw.get("peft_type") != "LORA":
        raise UnsupportedError(f"peft_type: {quoted(raw.get('peft_type'))}; jaxllm reads 'LORA'")
    if raw.get("bias", "none") != "none":
        raise UnsupportedError(
            f"bias: {quoted(raw['bias'])}; only 'none' is read: biases stay the base's"
        )
    if raw.get("init_lora_weights", True) not in KEEP_BASE:
        raise UnsupportedError(
            f"init_lora_weights: {quoted(raw['init_lora_weights'])} changes the base weights or "
            "the training; convert the adapter to plain LoRA with PEFT "
            "(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )


def check_patterns(name: str, value: object) -> dict[str, Any]:
    """Checks rank_pattern or alpha_pattern: module names, with anchors at most, and numbers."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected an object, found {quoted(value)}")
    numbers = {}
    for pattern, number in value.items():
        if not PLAIN_PATTERN.fullmatch(pattern) or len(pattern) > 200:
            raise UnsupportedError(
                f"{name}: {quoted(pattern)} is more than a module name; regular expressions of a "
                "file are not run"
            )
        try:
            re.compile(pattern)
        except re.error as failure:
            raise ConfigError(f"{name}: {quoted(pattern)}: {failure}") from None
        if number is None:
            raise ConfigError(f"{name}[{pattern!r}]: expected a number, found null")
        numbers[pattern] = coerce(f"{name}[{pattern!r}]", number, int if name[0] == "r" else float)
        if name == "rank_pattern" and numbers[pattern] < 1:
            raise ConfigError(f"{name}[{pattern!r}]: expected a rank from 1 on, found {number}")
    return numbers
