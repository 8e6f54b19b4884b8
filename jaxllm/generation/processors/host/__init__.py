"""Logits processors that call Python functions on the host."""

from jaxllm.generation.processors.host.grammar import GrammarLogitsProcessor
from jaxllm.generation.processors.host.prefix import PrefixConstrainedLogitsProcessor
from jaxllm.generation.processors.host.python_function import HostLogitsProcessor

__all__ = ["GrammarLogitsProcessor", "HostLogitsProcessor", "PrefixConstrainedLogitsProcessor"]
