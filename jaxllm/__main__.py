"""`python -m jaxllm`: the same as the `jaxllm` command."""

from jaxllm.cli.main import script

script()
