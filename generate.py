"""Generate text: ``python generate.py "prompt"``; ``--help`` lists the options."""

from jaxllm.cli.main import script

if __name__ == "__main__":
    script("generate", "generate.py")
