"""T5, Llama and GPT-2 in JAX/Flax, with jit-compiled decoding."""

import jaxllm.contrib  # noqa: F401  (registers its processors and prompt transforms)
from jaxllm.batch import BatchGenerator, BatchOutput
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.call.output import GenerateOutput
from jaxllm.generation.generate import generate, stream
from jaxllm.generation.scoring.score import ScoreOutput, score
from jaxllm.generation.scoring.transition_scores import compute_transition_scores
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.loading import load, load_orbax, save_hf, save_orbax
from jaxllm.parallel.sharding import make_mesh
from jaxllm.planning import abstract_model, lower, plan

__version__ = "0.1.0"

__all__ = [
    "BatchGenerator",
    "BatchOutput",
    "GenerateOutput",
    "GenerationConfig",
    "JaxLLMError",
    "ScoreOutput",
    "abstract_model",
    "compute_transition_scores",
    "generate",
    "load",
    "load_orbax",
    "lower",
    "make_mesh",
    "plan",
    "save_hf",
    "save_orbax",
    "score",
    "stream",
]
