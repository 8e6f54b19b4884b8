"""Generation settings: fields, value checks, lengths and special tokens."""

from jaxllm.generation.settings.config import FIELDS, GenerationConfig, declare_field
from jaxllm.generation.settings.consistency import UnusedFieldWarning
from jaxllm.generation.settings.fields import Field

__all__ = ["FIELDS", "Field", "GenerationConfig", "UnusedFieldWarning", "declare_field"]
