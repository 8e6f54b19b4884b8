"""OpenAI's HTTP interface over `AsyncEngine`: `jaxllm serve`.

Internal: the command is the interface. Needs ``pip install 'jaxllm[serve]'``.
"""
