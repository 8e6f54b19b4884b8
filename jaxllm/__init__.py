"""T5, Llama and GPT-2 in JAX/Flax, with jit-compiled decoding."""
