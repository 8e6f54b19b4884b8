"""Fine-tuning with optax: losses, optimizers, and the compiled training step.

`training.data` makes batches, `training.evaluation` scores a model, `training.lora` adds adapters.
"""

from jaxllm.training.classifier import with_classifier
from jaxllm.training.dpo import DPOConfig, DPOLoss
from jaxllm.training.losses import (
    CausalLoss,
    ClassificationLoss,
    LossSums,
    Seq2SeqLoss,
    loss_for,
)
from jaxllm.training.optimizers import OptimizerConfig, labels, make_optimizer, make_schedule
from jaxllm.training.state import TrainState
from jaxllm.training.step import make_train_step

__all__ = [
    "CausalLoss",
    "ClassificationLoss",
    "DPOConfig",
    "DPOLoss",
    "LossSums",
    "OptimizerConfig",
    "Seq2SeqLoss",
    "TrainState",
    "labels",
    "loss_for",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "with_classifier",
]
