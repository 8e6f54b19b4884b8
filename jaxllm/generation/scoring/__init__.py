"""Log-likelihoods of given completions, and scores of generated tokens."""
