"""Reads PEFT's adapter_config.json strictly: a field is used, is known to be inert, or raises."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.common.strict_json import read_json

MAX_CONFIG_BYTES = 4 * 2**20
CLASSIFIER_NAMES = ("classifier", "score")  # PEFT adds both to each classifier's modules_to_save

# Provenance, and options of initialisation and training: they do not change the adapter's output.
# fan_in_fan_out says how the *base* weight is stored, which the model knows.
INERT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
# Initialisations that leave the base weights alone; the others (PiSSA, OLoRA, ...) change them.
KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
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
    narrowed: bool = False
    """True if exclude_modules or layers_to_transform may exclude some of the targets."""

    def rank_of(self, module: str) -> int:
        return match_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        return match_pattern(self.alpha_pattern, module, self.lora_alpha)

    def targets(self, module: str) -> bool:
        """True if target_modules, a list, names this module (by its Hugging Face name)."""
        return any(module == t or module.endswith(f".{t}") for t in self.target_modules)


def match_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Value of the first pattern that matches the name or its end, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(path: Path) -> PeftConfig:
    """Reads an adapter_config.json.

    Unknown fields pass if they are null, false or empty.

    Raises:
        MissingFileError: There is no such file.
        ConfigError: An invalid value.
        UnsupportedError: A field that jaxllm does not know or does not implement.
    """
    raw = read_json(path, max_bytes=MAX_CONFIG_BYTES, error=ConfigError)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object")
    try:
        return parse_peft_config(raw)
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from None


def parse_peft_config(raw: Mapping[str, Any]) -> PeftConfig:
    """`read_peft_config` for the parsed JSON."""
    if raw.get("peft_type") != "LORA":
        raise UnsupportedError(f"peft_type: {raw.get('peft_type')!r}; jaxllm reads 'LORA'")
    if raw.get("bias", "none") != "none":
        raise UnsupportedError(
            f"bias: {raw['bias']!r}; only 'none' is read: biases stay the base's"
        )
    if raw.get("init_lora_weights", True) not in KEEP_BASE:
        raise UnsupportedError(
            f"init_lora_weights: {raw['init_lora_weights']!r} changes the base weights or the "
            "training; convert the adapter to plain LoRA with PEFT "
            "(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    known = {f.name for f in dataclasses.fields(PeftConfig)} - {"narrowed"}
    narrowing = ("exclude_modules", "layers_to_transform", "layers_pattern")
    passed = INERT | known | {*narrowing, "peft_type", "bias", "init_lora_weights"}
    for name, value in raw.items():
        if name not in passed and not is_empty(value):
            raise UnsupportedError(f"{name}: {short(value)} is not implemented")
    values = {name: raw[name] for name in known if raw.get(name) is not None}
    for name, value in values.items():
        values[name] = CHECKS[name](name, value)
    if not values.get("target_modules"):
        raise ConfigError("target_modules: missing or empty; it names the layers with LoRA")
    narrowed = any(raw.get(name) not in (None, "", []) for name in narrowing)
    return PeftConfig(**values, narrowed=narrowed)


def is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def wrong(name: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"{name}: expected {expected}, found {short(value)}")


def check_rank(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise wrong(name, "an integer from 1 on", value)
    return value


def check_number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e30:
        raise wrong(name, "a number", value)
    return value


def check_rate(name: str, value: Any) -> float:
    if not 0 <= check_number(name, value) < 1:
        raise wrong(name, "a rate in [0, 1)", value)
    return value


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def check_string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def check_names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) and x for x in value):
        raise wrong(name, "a list of module names", value)
    return tuple(value)


def check_targets(name: str, value: Any) -> tuple[str, ...] | str:
    """Checks a list of names, or a regular expression (never run: the tensors are the targets)."""
    return value if isinstance(value, str) else check_names(name, value)


def check_ranks(name: str, value: Any) -> dict[str, int]:
    return {k: check_rank(f"{name}[{k!r}]", v) for k, v in pattern_items(name, value)}


def check_alphas(name: str, value: Any) -> dict[str, float]:
    return {k: check_number(f"{name}[{k!r}]", v) for k, v in pattern_items(name, value)}


def pattern_items(name: str, value: Any) -> Sequence[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    for pattern in value:
        if not PLAIN_PATTERN.fullmatch(pattern) or len(pattern) > 200:
            raise UnsupportedError(
                f"{name}: {short(pattern)} is more than a module name; regular expressions of a "
                "file are not run"
            )
        try:
            re.compile(pattern)
        except re.error as failure:
            raise ConfigError(f"{name}: {short(pattern)}: {failure}") from None
    return list(value.items())


CHECKS = {
    "r": check_rank,
    "lora_alpha": check_number,
    "lora_dropout": check_rate,
    "use_rslora": check_bool,
    "use_dora": check_bool,
    "task_type": check_string,
    "target_modules": check_targets,
    "modules_to_save": check_names,
    "rank_pattern": check_ranks,
    "alpha_pattern": check_alphas,
}
