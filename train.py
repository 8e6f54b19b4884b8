"""Train a model: ``python train.py configs/NAME.yaml --output-dir OUT``; ``--help`` says more."""

from jaxllm.cli.main import script

if __name__ == "__main__":
    script("train", "train.py")
