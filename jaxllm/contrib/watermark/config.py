"""Settings of both watermarks, with the names used in transformers and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.green_list import WatermarkLogitsProcessor
from jaxllm.contrib.watermark.synthid import SynthIDTextWatermarkLogitsProcessor


class _Config:
    """Base class of both configs: conversion from and to a mapping."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Self:
        """Creates the config from names and values, as in a file."""
        names = {field.name for field in fields(cls)}  # pyright: ignore[reportArgumentType]
        unknown = sorted(map(str, set(config_dict) - names))
        if unknown:
            raise InputError(
                f"watermarking_config: {unknown[0]!r} is not among the settings of "
                f"{cls.__name__}, which are {sorted(names)}"
            )
        try:
            return cls(**config_dict)
        except TypeError as error:  # a setting without a default is missing
            raise InputError(f"watermarking_config: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class WatermarkingConfig(_Config):
    """Green-list config (Kirchenbauer et al. 2023); see :class:`WatermarkLogitsProcessor`.

    >>> WatermarkingConfig.from_dict({"bias": 2.5, "seeding_scheme": "selfhash"}).context_width
    1
    """

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        self.construct_processor(vocab_size=2**10)

    def construct_processor(self, vocab_size: int) -> WatermarkLogitsProcessor:
        return WatermarkLogitsProcessor(vocab_size, **self.to_dict())


@dataclass(frozen=True)
class SynthIDTextWatermarkingConfig(_Config):
    """SynthID config (Dathathri et al. 2024); see :class:`SynthIDTextWatermarkLogitsProcessor`."""

    ngram_len: int
    keys: tuple[int, ...]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keys, list):
            object.__setattr__(self, "keys", tuple(self.keys))
        self.construct_processor()

    def construct_processor(
        self, vocab_size: int | None = None, prompt_len: int | None = None
    ) -> SynthIDTextWatermarkLogitsProcessor:
        """Builds the processor; ``vocab_size`` is unused. ``generate`` passes the prompt length."""
        return SynthIDTextWatermarkLogitsProcessor(**self.to_dict(), prompt_len=prompt_len)


def watermarking_config(
    value: Mapping[str, Any] | WatermarkingConfig | SynthIDTextWatermarkingConfig,
) -> WatermarkingConfig | SynthIDTextWatermarkingConfig:
    """Converts the field ``watermarking_config`` of a generation config to one of the two classes.

    A mapping with ``ngram_len`` or ``keys`` is SynthID's (transformers itself does not read these
    from a file).
    """
    if isinstance(value, WatermarkingConfig | SynthIDTextWatermarkingConfig):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            "watermarking_config: expected a WatermarkingConfig, a SynthIDTextWatermarkingConfig "
            f"or a mapping with their settings, found {value!r}"
        )
    synthid = "ngram_len" in value or "keys" in value
    return (SynthIDTextWatermarkingConfig if synthid else WatermarkingConfig).from_dict(value)
