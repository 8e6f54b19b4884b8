"""Evaluation of whole models: the perplexity of a text."""

from jaxllm.evaluate.perplexity import PerplexityOutput, perplexity

__all__ = ["PerplexityOutput", "perplexity"]
