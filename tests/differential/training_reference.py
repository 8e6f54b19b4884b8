"""What torch, transformers, PEFT and TRL compute for a combination of `training_cases`.

Everything is in float64, so that a difference is jaxllm's rounding or a fault.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import trl
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from training_cases import (
    ADJUSTED,
    CLASSIFIERS,
    FACTORED,
    IGNORED,
    PARITY,
    STEPS,
    T5,
    Arrays,
    Combination,
    family_of,
    lora_batch,
    pairs,
    parameters_and_gradients,
    reference_noise,
    schedule_steps,
    token_batch,
    trained_tensor,
)
from transformers import optimization

torch.set_num_threads(1)  # the models are too small for more

LEFT = "left padding predicts nothing"
LAST_COLUMN = "TRL drops the last column of an encoder-decoder"
IPO_REWARDS = "IPO rewards of whole answers"
SMALL = "Adafactor factors from 128 on"
DECOUPLED = "weight decay by the learning rate alone"
CLIP = "torch adds 1e-6 to the norm"
COSINE = "a cosine stays at its end"


class Float64(TorchFunctionMode):
    """Turns casts to float32 into casts to float64, in which the model then computes everything.

    Models and TRL have some, for example in norms and softmax.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()

        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(widened, args), **{k: widened(v) for k, v in (kwargs or {}).items()})


def theirs(combination: Combination) -> Arrays:
    """The reference's results for a combination, in float64."""
    return as_arrays(THEIRS[combination["area"]](combination))


def as_arrays(results: dict[str, Any]) -> Arrays:
    return {name: np.array(torch.as_tensor(x).detach()) for name, x in results.items()}


@functools.cache
def loaded(name: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(PARITY / name)
    cls = getattr(transformers, config.architectures[0])
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return cls.from_pretrained(PARITY / name, **options).eval()


def model_of(name: str) -> Any:
    """A copy of a model of tests/data/parity, in evaluation mode, so without dropout."""
    return copy.deepcopy(loaded(name)).double()


def named_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {f"grad:{name}": zeros_if_none(x) for name, x in model.named_parameters()}


def zeros_if_none(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


# Gradients -------------------------------------------------------------------------------------


def token_sums(model: Any, combination: Combination, batch: Arrays) -> tuple[torch.Tensor, ...]:
    """Sum of the losses, number of labels, and number of labels that are predicted."""
    is_t5 = combination["model"] in T5
    parts = documents(batch, is_t5) if "segment_ids" in batch else [whole(batch, is_t5)]
    skip_first = LEFT in combination.get(ADJUSTED, ())
    results = [predicted(model, part, is_t5, skip_first) for part in parts]
    logits = torch.cat([x.flatten(0, 1) for x, _ in results])
    labels = torch.cat([y.flatten() for _, y in results])
    counted = labels != IGNORED
    losses = functional.cross_entropy(
        logits, labels, reduction="sum", label_smoothing=combination.get("label_smoothing", 0.0)
    )
    log_z = torch.logsumexp(logits, -1)[counted]
    total = losses + combination.get("z_loss", 0.0) * log_z.square().sum()
    return total, counted.sum(), ((logits.argmax(-1) == labels) & counted).sum()


def predicted(
    model: Any, part: dict[str, torch.Tensor], is_t5: bool, skip_first: bool
) -> tuple[torch.Tensor, ...]:
    """Logits, and the labels that they predict; with `skip_first`, padding predicts none."""
    labels = part.pop("labels")
    if is_t5:
        return model(**part, labels=labels).logits, labels
    logits = model(**part).logits
    if skip_first and "attention_mask" in part:
        padded = part["attention_mask"][:, :-1] == 0
        labels[:, 1:] = labels[:, 1:].masked_fill(padded, IGNORED)
    return logits[:, :-1], labels[:, 1:]


def whole(batch: Arrays, is_t5: bool) -> dict[str, torch.Tensor]:
    """The batch as it is, with the positions that transformers itself uses in generation."""
    tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
    mask = tensors.get("attention_mask")
    if mask is not None and not is_t5:
        tensors["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return tensors


def documents(batch: Arrays, is_t5: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Every document of packed rows as a batch of its own."""
    numbers = batch["segment_ids"]
    targets = batch["decoder_segment_ids"] if is_t5 else numbers
    for row in range(len(numbers)):
        for number in range(1, numbers[row].max() + 1):
            here, there = numbers[row] == number, targets[row] == number
            part = {
                "input_ids": batch["input_ids"][row, here],
                "labels": batch["labels"][row, there],
            }
            yield {name: torch.tensor(x[None], dtype=torch.long) for name, x in part.items()}


def gradients(combination: Combination) -> dict[str, Any]:
    model = model_of(combination["model"])
    batch = token_batch(combination)
    with Float64():
        total, count, right = token_sums(model, combination, batch)
    (total / count.clamp(min=1)).backward()
    results = {"loss": total / count.clamp(min=1), "tokens": count}
    return results | {"accuracy": right / count.clamp(min=1)} | named_gradients(model)


# LoRA ------------------------------------------------------------------------------------------


def peft_model(combination: Combination) -> PeftModel:
    """The model with PEFT's own adapter, whose tensors have the drawn values."""
    name = combination["model"]
    tasks = {**dict.fromkeys(T5, "SEQ_2_SEQ_LM"), **dict.fromkeys(CLASSIFIERS, "SEQ_CLS")}
    targets = combination["targets"]
    config = LoraConfig(
        task_type=tasks.get(name, "CAUSAL_LM"),
        r=combination["rank"],
        lora_alpha=combination["alpha"],
        use_rslora=combination["rslora"],
        use_dora=combination["dora"],
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=combination["modules_to_save"] or None,
        fan_in_fan_out=family_of(name) == "gpt2",
    )
    model = get_peft_model(copy.deepcopy(loaded(name)), config).eval()
    for key, x in trained_tensors(model).items():
        value = trained_tensor(combination["seed"], key, x.detach().numpy())
        x.data.copy_(torch.tensor(value))
    return model


def trained_tensors(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The parameters of the adapter by their names in its file."""
    by_memory = {x.data_ptr(): x for x in model.parameters() if x.requires_grad}
    state = get_peft_model_state_dict(model)
    return {name: by_memory[x.data_ptr()] for name, x in state.items() if x.data_ptr() in by_memory}


def lora(combination: Combination, model: PeftModel | None = None) -> dict[str, Any]:
    model = (peft_model(combination) if model is None else model).eval().double()
    batch = {k: torch.tensor(x, dtype=torch.long) for k, x in lora_batch(combination).items()}
    with Float64():
        out = model(**batch)
    out.loss.backward()
    named = {f"grad:{name}": zeros_if_none(x) for name, x in trained_tensors(model).items()}
    with torch.no_grad(), Float64():
        merged = model.merge_and_unload()(**batch).logits
    return {"loss": out.loss, "logits": out.logits, "merged": merged} | named


@contextlib.contextmanager
def saved_adapter(combination: Combination) -> Iterator[Path]:
    """A folder to which PEFT has written the adapter."""
    with tempfile.TemporaryDirectory() as folder:
        peft_model(combination).save_pretrained(folder)
        yield Path(folder)


def lora_from_file(combination: Combination, folder: Path) -> Arrays:
    """Results of an adapter that jaxllm has written."""
    base = copy.deepcopy(loaded(combination["model"]))
    return as_arrays(lora(combination, PeftModel.from_pretrained(base, folder, is_trainable=True)))


# DPO -------------------------------------------------------------------------------------------


def trainer(combination: Combination, model: Any, reference: Any, loss_type: str) -> Any:
    """TRL's trainer with what its loss functions need; its constructor would want a data set."""
    made = trl.DPOTrainer.__new__(trl.DPOTrainer)
    made.accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    made.args = SimpleNamespace(rpo_alpha=None, ld_alpha=None, use_liger_loss=False)
    made.model, made.ref_model = model, reference
    made.beta, made.label_smoothing = combination["beta"], combination["label_smoothing"]
    made.loss_type, made.loss_weights = [loss_type], None
    made.f_divergence_type, made.f_divergence_params = "reverse_kl", None
    made.reference_free = made.use_weighting = made.aux_loss_enabled = False
    made.padding_free = made.use_logits_to_keep = made._peft_has_been_casted_to_bf16 = False
    made.is_encoder_decoder = combination["model"] in T5
    made.pad_token_id, made.label_pad_token_id, made.max_length = 0, IGNORED, None
    return made


def pair_tensors(combination: Combination, spare_column: bool) -> dict[str, torch.Tensor]:
    """A batch as TRL's collator makes it; with a spare column, answers end with a pad."""
    drawn = pairs(combination)
    prompts, answers = drawn["prompts"], drawn["answers"]
    columns = np.arange(prompts.shape[1])
    mask = columns >= prompts.shape[1] - drawn["prompt_lengths"][:, None]
    rolled = [np.roll(x, -n) for x, n in zip(prompts, drawn["prompt_lengths"], strict=True)]
    batch = {"prompt_input_ids": np.array(rolled) * mask, "prompt_attention_mask": mask}
    width = drawn["lengths"].max() + spare_column
    for side, name in enumerate(("chosen", "rejected")):
        real = np.arange(width) < drawn["lengths"][:, side, None]
        padded = np.pad(answers[:, side], ((0, 0), (0, 1)))[:, :width]
        batch[f"{name}_input_ids"] = padded * real
        batch[f"{name}_attention_mask"] = real
    return {name: torch.tensor(x.astype(int)) for name, x in batch.items()}


def dpo(combination: Combination) -> dict[str, Any]:
    """With `IPO_REWARDS`, rewards and log-probabilities are those of TRL's "sigmoid"."""
    adjusted = combination.get(ADJUSTED, ())
    spare_column = combination["spare_column"] or LAST_COLUMN in adjusted
    types = [combination["loss_type"], *(["sigmoid"] if IPO_REWARDS in adjusted else [])]
    model, reference = (model_of(combination["model"]) for _ in range(2))
    with torch.no_grad():
        for name, x in reference.named_parameters():
            x += torch.tensor(reference_noise(combination["seed"], name, tuple(x.shape)))
    results, metrics = [], {}
    for loss_type in types:
        side = trainer(combination, model, reference, loss_type)
        batches = [pair_tensors(combination, spare_column) for _ in range(2)]  # TRL changes them
        with Float64():
            loss, metrics = side.get_batch_loss_metrics(model, batches[0])
            logps = side.compute_ref_log_probs(batches[1])
        results.append(loss)
    results[0].backward()
    metrics = {k: torch.tensor(x) for k, x in metrics.items() if not k.startswith("logits")}
    named = {"reference": torch.stack(logps, 1), "loss": results[0]}
    return named | metrics | named_gradients(model)


# Optimizers ------------------------------------------------------------------------------------


def optimizers(combination: Combination) -> dict[str, Any]:
    """Changes after the first and the last step of torch's or transformers' optimizer."""
    settings, numpy_grads = combination["settings"], parameters_and_gradients(combination)
    start, adjusted = numpy_grads[0], combination.get(ADJUSTED, ())
    params = {path: torch.nn.Parameter(tensor_of(x, adjusted)) for path, x in start.items()}
    optimizer = optimizer_of(settings, params, adjusted)
    results = {}
    for number, grads in enumerate(numpy_grads[1]):
        for path, x in params.items():
            x.grad = tensor_of(grads[path], adjusted)
        if settings["clip_norm"] is not None:
            clip(params.values(), settings["clip_norm"], adjusted)
        amounts = decay_amounts(settings, params) if DECOUPLED in adjusted else {}
        optimizer.step()
        for path, amount in amounts.items():
            params[path].data.sub_(amount)
        if number in (0, STEPS - 1):
            results |= {
                f"{number + 1}:{path}": x.detach().reshape(start[path].shape).numpy() - start[path]
                for path, x in params.items()
            }
    return results


def tensor_of(x: np.ndarray, adjusted: Sequence[str]) -> torch.Tensor:
    """A float64 tensor; small matrices as vectors, which transformers does not factor either."""
    is_small = x.ndim == 2 and min(x.shape) < FACTORED
    return torch.tensor(x.reshape(-1) if is_small and SMALL in adjusted else x).double()


def clip(params: Iterable[torch.nn.Parameter], max_norm: float, adjusted: Sequence[str]) -> None:
    """Clips the gradients as torch does, or without the 1e-6 that it adds to the norm."""
    params = list(params)
    norm = torch.nn.utils.get_total_norm([x.grad for x in params if x.grad is not None])
    if CLIP not in adjusted:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return
    for x in params:
        if x.grad is not None:
            x.grad.mul_((max_norm / norm).clamp(max=1.0))


def decayed_paths(settings: Combination, params: dict[str, Any]) -> list[str]:
    """Parameters with weight decay: those with neither one axis nor a pattern of `no_decay`."""
    import re

    patterns = settings.get("no_decay", ["position_bias"])
    one_axis = ("norm", ".bias")
    return [
        path
        for path in params
        if not any(re.search(pattern, path) for pattern in patterns)
        and not any(part in path for part in one_axis)
    ]


def optimizer_of(
    settings: Combination, params: dict[str, Any], adjusted: Sequence[str]
) -> torch.optim.Optimizer:
    weight_decay = 0.0 if DECOUPLED in adjusted else settings.get("weight_decay", 0.0)
    decayed = decayed_paths(settings, params)
    groups = [
        {"params": [params[path] for path in decayed], "weight_decay": weight_decay},
        {"params": [x for path, x in params.items() if path not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, momentum = settings["learning_rate"], settings.get("momentum")
    match settings["name"]:
        case "sgd":
            return torch.optim.SGD(groups, rate, momentum or 0.0, nesterov=momentum is not None)
        case "adafactor":
            options = {"scale_parameter": True, "relative_step": False, "warmup_init": False}
            return optimization.Adafactor(groups, lr=rate, beta1=momentum, **options)
        case _:
            betas = (settings.get("b1", 0.9), settings.get("b2", 0.999))
            return torch.optim.AdamW(groups, rate, betas, settings.get("eps", 1e-8))


def decay_amounts(settings: Combination, params: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weight decay by the learning rate alone, as torch's AdamW has it."""
    share = settings["learning_rate"] * settings.get("weight_decay", 0.0)
    return {path: share * params[path].detach() for path in decayed_paths(settings, params)}


# Schedules -------------------------------------------------------------------------------------


def schedules(combination: Combination) -> dict[str, Any]:
    """Learning rates of transformers' schedules, as shares of the peak."""
    settings, steps = combination["settings"], schedule_steps(combination)
    if COSINE in combination.get(ADJUSTED, ()):
        steps = steps.clip(max=settings["schedule_steps"])
    optimizer = torch.optim.SGD([torch.zeros(1)], settings["learning_rate"])
    multiplier = schedule_of(settings, optimizer).lr_lambdas[0]
    return {"rates": torch.tensor([multiplier(int(n)) for n in steps]).double()}


def schedule_of(settings: Combination, optimizer: Any) -> Any:
    warmup, end = settings["warmup_steps"], settings.get("final_factor") or 0.0
    match settings["schedule"]:
        case "constant" if not warmup:
            return optimization.get_constant_schedule(optimizer)
        case "constant":
            return optimization.get_constant_schedule_with_warmup(optimizer, warmup)
        case "inverse_sqrt":
            return optimization.get_inverse_sqrt_schedule(optimizer, warmup)
        case "linear" if end == 1:  # transformers refuses it
            return optimization.get_constant_schedule_with_warmup(optimizer, warmup)
        case "linear" if end:
            return optimization.get_polynomial_decay_schedule_with_warmup(
                optimizer, warmup, settings["schedule_steps"], end * settings["learning_rate"], 1.0
            )
        case "linear":
            return optimization.get_linear_schedule_with_warmup(
                optimizer, warmup, settings["schedule_steps"]
            )
        case "cosine" if end:
            return optimization.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, warmup, settings["schedule_steps"], min_lr_rate=end
            )
        case "cosine":
            return optimization.get_cosine_schedule_with_warmup(
                optimizer, warmup, settings["schedule_steps"]
            )
        case name:
            raise ValueError(f"schedule {name!r} has no reference")


# Whole runs with a moving average ----------------------------------------------------------------


def averages(combination: Combination) -> dict[str, Any]:
    """Changes by a few steps of torch's SGD, and those of torch's moving average."""
    start = dict(model_of(combination["model"]).named_parameters())
    model, settings = model_of(combination["model"]), combination["optimizer"]
    average = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(combination["ema_decay"]), use_buffers=False
    )
    average.update_parameters(model)  # the first call copies: the average begins at the start
    optimizer = torch.optim.SGD(
        model.parameters(), settings["learning_rate"], settings["momentum"], nesterov=True
    )
    schedule = schedule_of(settings, optimizer)
    for number in range(combination["steps"]):
        batch = token_batch({**combination, "seed": combination["seed"] + number})
        with Float64():
            total, count, _ = token_sums(model, combination, batch)
        optimizer.zero_grad()
        (total / count.clamp(min=1)).backward()
        clip(model.parameters(), settings["clip_norm"], ())
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    return {f"param:{name}": x - start[name] for name, x in model.named_parameters()} | {
        f"average:{name}": x - start[name] for name, x in average.module.named_parameters()
    }


THEIRS = {
    "gradients": gradients,
    "lora": lora,
    "dpo": dpo,
    "optimizers": optimizers,
    "schedules": schedules,
    "averages": averages,
}
