"""Log-likelihoods of given completions, and scores of generated tokens."""

from jaxllm.generation.scoring.score import ScoreOutput, score
from jaxllm.generation.scoring.transition_scores import compute_transition_scores

__all__ = ["ScoreOutput", "compute_transition_scores", "score"]
