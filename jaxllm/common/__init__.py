"""Shared foundations: errors, strict JSON, atomic files, the run lock."""

from jaxllm.common.atomic_file import replacing, write_whole
from jaxllm.common.errors import JaxLLMError
from jaxllm.common.optional_deps import require
from jaxllm.common.run_lock import RunLock
from jaxllm.common.strict_json import parse_json, read_json

__all__ = [
    "JaxLLMError",
    "RunLock",
    "parse_json",
    "read_json",
    "replacing",
    "require",
    "write_whole",
]
