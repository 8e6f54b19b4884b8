"""The error classes of jaxllm, for ``except jaxllm.errors.CheckpointError``."""

from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    JaxLLMError,
    MissingExtraError,
    MissingFileError,
    NonFiniteError,
    RunError,
    TemplateError,
    TokenizerError,
    UnsupportedError,
    WorkerStoppedError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InputError",
    "JaxLLMError",
    "MissingExtraError",
    "MissingFileError",
    "NonFiniteError",
    "RunError",
    "TemplateError",
    "TokenizerError",
    "UnsupportedError",
    "WorkerStoppedError",
]
