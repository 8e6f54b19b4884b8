"""Generation of sequences: settings, strategies, logits processors, stopping criteria."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxllm.generation import processors, stopping
from jaxllm.generation.call.output import GenerateOutput
from jaxllm.generation.generate import compile_programs, generate, stream
from jaxllm.generation.processors import *  # noqa: F403
from jaxllm.generation.processors import grammar
from jaxllm.generation.registration import (
    register_processor,
    register_prompt_transform,
    register_strategy,
)
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping import *  # noqa: F403
from jaxllm.generation.strategies.constrained_beam import (
    DisjunctiveConstraint,
    PhrasalConstraint,
)

if TYPE_CHECKING:
    from jaxllm.contrib.watermark import (
        SynthIDTextWatermarkingConfig,
        SynthIDTextWatermarkLogitsProcessor,
        WatermarkDetector,
        WatermarkingConfig,
        WatermarkLogitsProcessor,
    )
    from jaxllm.generation.scoring import ScoreOutput, compute_transition_scores

_IMPORTED_ON_USE = {
    "ScoreOutput": "jaxllm.generation.scoring",
    "SynthIDTextWatermarkLogitsProcessor": "jaxllm.contrib.watermark",
    "SynthIDTextWatermarkingConfig": "jaxllm.contrib.watermark",
    "WatermarkDetector": "jaxllm.contrib.watermark",
    "WatermarkLogitsProcessor": "jaxllm.contrib.watermark",
    "WatermarkingConfig": "jaxllm.contrib.watermark",
    "compute_transition_scores": "jaxllm.generation.scoring",
}

__all__ = [
    "DisjunctiveConstraint",
    "GenerateOutput",
    "GenerationConfig",
    "PhrasalConstraint",
    "ScoreOutput",
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "WatermarkDetector",
    "WatermarkLogitsProcessor",
    "WatermarkingConfig",
    "compile_programs",
    "compute_transition_scores",
    "generate",
    "grammar",
    "register_processor",
    "register_prompt_transform",
    "register_strategy",
    "stream",
]
__all__ += processors.__all__
__all__ += stopping.__all__


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_ON_USE:
        return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
