"""Generate text: ``python generate.py "prompt"``; ``--help`` lists the options."""

import sys

from jaxllm.cli.generate import main

if __name__ == "__main__":
    sys.exit(main(program="generate.py"))
