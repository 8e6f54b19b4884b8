"""T5 with its layouts v1.0, v1.1 / flan, mT5 and umT5."""

from jaxllm.models.t5.config import T5Config
from jaxllm.models.t5.encoder import T5EncoderModel
from jaxllm.models.t5.model import T5ForConditionalGeneration, shift_tokens_right

__all__ = ["T5Config", "T5EncoderModel", "T5ForConditionalGeneration", "shift_tokens_right"]
