"""Preparation of a `generate()` call on the host, and its output.

Internal: the public names are in `jaxllm.generation`. `prepare_call` checks the arguments and pads
them to buckets; `generate_output` builds what the caller gets.
"""
