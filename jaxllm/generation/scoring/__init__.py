"""Log-likelihoods of given completions, and scores of generated tokens.

The public names are in `jaxllm`: `score`, `ScoreOutput`, `compute_transition_scores`.
"""
