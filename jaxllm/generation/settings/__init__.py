"""Generation settings: fields, value checks, lengths and special tokens."""

from jaxllm.generation.settings.config import FIELDS, GenerationConfig, declare_field
from jaxllm.generation.settings.fields import Field
from jaxllm.generation.settings.resolve import UnusedFieldWarning

__all__ = ["FIELDS", "Field", "GenerationConfig", "UnusedFieldWarning", "declare_field"]
