"""Train a model: ``python train.py configs/NAME.yaml --output-dir OUT``; ``--help`` says more."""

import sys

from jaxllm.cli.train import main

if __name__ == "__main__":
    sys.exit(main(program="train.py"))
