"""Evaluation: loss and perplexity of a full set, and scores of generated answers."""

from jaxllm.training.evaluation.evaluate import EvalResult, evaluate
from jaxllm.training.evaluation.generation import (
    METRICS,
    EvalPrompt,
    EvalSample,
    GenerationResult,
    generate_and_score,
    score_texts,
)

__all__ = [
    "METRICS",
    "EvalPrompt",
    "EvalResult",
    "EvalSample",
    "GenerationResult",
    "evaluate",
    "generate_and_score",
    "score_texts",
]
