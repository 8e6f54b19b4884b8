"""T5, Llama and GPT-2 in JAX/Flax, with jit-compiled decoding."""

from jaxllm.errors import JaxLLMError
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.engine import BatchGenerator, BatchOutput
from jaxllm.generation.generate import generate, stream
from jaxllm.generation.output import GenerateOutput
from jaxllm.generation.score import ScoreOutput, score
from jaxllm.generation.transition_scores import compute_transition_scores
from jaxllm.loading import load, load_orbax, save_hf, save_orbax
from jaxllm.sharding import make_mesh

__version__ = "0.1.0"

__all__ = [
    "BatchGenerator",
    "BatchOutput",
    "GenerateOutput",
    "GenerationConfig",
    "JaxLLMError",
    "ScoreOutput",
    "compute_transition_scores",
    "generate",
    "load",
    "load_orbax",
    "make_mesh",
    "save_hf",
    "save_orbax",
    "score",
    "stream",
]
