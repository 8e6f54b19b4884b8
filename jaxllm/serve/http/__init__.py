"""OpenAI's HTTP interface over `AsyncEngine`: `jaxllm serve`.

Needs ``pip install jaxllm[serve]``.
"""
