"""Training runs from recipes, as run by `train.py`: `train(read_recipe(path))`."""

from jaxllm.training.run.recipe import Recipe, read_recipe
from jaxllm.training.run.run import RunResult, train

__all__ = ["Recipe", "RunResult", "read_recipe", "train"]
