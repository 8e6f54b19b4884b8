"""Makes losses.json and adapters.npz: ten steps of each recipe with transformers 5.24.0's Trainer,
PEFT 0.21.2 and TRL 1.16.0.

Run with torch, transformers, peft, trl and datasets installed: ``python make.py``. The models are
those of ../conformance and ../parity.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer_cases import (
    CASES,
    NO_DROPOUT,
    PREFERENCES,
    RATE,
    ROWS,
    STEPS,
    T5,
    WIDE_T5,
    first_a,
    rows,
    weight,
)

HERE = Path(__file__).parent


def model_of(name: str) -> Any:
    if name == "wide_t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**WIDE_T5))
        for key, x in model.named_parameters():
            x.data = torch.tensor(weight(key, tuple(x.shape)))
        return model
    folder = HERE.parent / "conformance" / "models" / name
    folder = folder if folder.exists() else HERE.parent / "parity" / name
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update(NO_DROPOUT.get(name, {}))
    cls = getattr(transformers, config.architectures[0])
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return cls.from_pretrained(folder, config=config, **options)


def recording(cls: type[Any]) -> type[Any]:
    """The Trainer class, which keeps the loss of every micro-batch and takes rows as they are."""

    class Recording(cls):
        losses: list[float]

        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            self.losses = [*getattr(self, "losses", []), float(loss)]
            return loss

        def _prepare_dataset(self, dataset: Any, *args: Any, **options: Any) -> Any:
            if "prompt_ids" in dataset.column_names:
                return dataset
            return super()._prepare_dataset(dataset, *args, **options)

    return Recording


def with_lora(model: Any, lora: dict[str, Any]) -> Any:
    targets = lora["targets"]
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=[targets] if isinstance(targets, str) else list(targets),
        use_rslora=lora.get("rslora", False),
        use_dora=lora.get("dora", False),
        fan_in_fan_out=targets == "c_attn",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    for name, x in model.named_parameters():
        if "lora_A" in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
            x.data = torch.tensor(first_a(layer, tuple(x.shape)))
    return model


def optimizers(case: str, model: Any, rate: float) -> tuple[Any, Any]:
    if case == "nesterov":
        made = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)
    elif case == "adafactor_scaled":
        made = transformers.Adafactor(
            model.parameters(), lr=rate, scale_parameter=True, relative_step=False
        )
    else:
        return (None, None)
    return made, torch.optim.lr_scheduler.ConstantLR(made, factor=1.0)


def collated(model: Any, rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = transformers.default_data_collator(rows)
    if model.config.is_encoder_decoder:  # as DataCollatorForSeq2Seq; label smoothing needs it
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return batch


def run(case: str) -> tuple[list[float], dict[str, np.ndarray], list[Any]]:
    """Losses of the steps, the adapter after them, and the packed rows."""
    settings = CASES[case]
    model, args = model_of(settings["model"]), dict(settings.get("args", {}))
    if "lora" in settings:
        model = with_lora(model, settings["lora"])
    if settings["model"] in T5:  # jaxllm does not factor the moments of such small tables
        for name, x in model.named_parameters():
            x.requires_grad_("relative_attention_bias" not in name)
    count = args.get("gradient_accumulation_steps", 1)
    args = {
        "learning_rate": PREFERENCES if "dpo" in settings else RATE,
        "lr_scheduler_type": "linear" if case == "linear" else "constant",
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // count,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **args,
    }
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": 2}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    data = Dataset.from_list(rows(case))
    with tempfile.TemporaryDirectory() as folder:
        args["output_dir"] = folder
        if "dpo" in settings:
            dpo = settings["dpo"]
            config = trl.DPOConfig(
                **args, beta=dpo["beta"], loss_type=[dpo["loss_type"]], max_length=None, bf16=False
            )
            trainer = recording(trl.DPOTrainer)(
                model=model, args=config, train_dataset=data, processing_class=tokenizer
            )
        elif case in ("packing", "completions"):
            options = {"packing": True, "max_length": 16} if case == "packing" else {}
            options |= {"completion_only_loss": case == "completions", "bf16": False}
            options |= {"per_device_train_batch_size": 1} if case == "packing" else {}
            config = trl.SFTConfig(**{**args, **options})
            trainer = recording(trl.SFTTrainer)(
                model=model, args=config, train_dataset=data, processing_class=tokenizer
            )
        else:
            trainer = recording(transformers.Trainer)(
                model=model,
                args=transformers.TrainingArguments(**args),
                train_dataset=data,
                data_collator=lambda rows: collated(model, rows),
                optimizers=optimizers(case, model, args["learning_rate"]),
            )
        trainer.train()
    losses = np.reshape(trainer.losses, (STEPS, count)).sum(1).tolist()
    adapter = {}
    if "lora" in settings:
        state = peft.utils.get_peft_model_state_dict(model)
        adapter = {f"{case}/{n}": x.numpy() for n, x in state.items() if ".1." in n}
    packed = []
    if case == "packing":
        packed = [
            {"input_ids": list(row["input_ids"]), "seq_lengths": list(row["seq_lengths"])}
            for row in trainer.train_dataset.select(range(STEPS))
        ]
    return losses, adapter, packed


def main() -> None:
    path = HERE / "losses.json"
    losses, adapters = {}, {}
    for case in CASES:
        losses[case], adapter, packed = run(case)
        adapters |= adapter
        if packed:
            losses["packed rows"] = packed
        print(case, [round(x, 4) for x in losses[case]], flush=True)
    path.write_text(json.dumps(losses) + "\n")
    np.savez_compressed(HERE / "adapters.npz", **adapters)


if __name__ == "__main__":
    main()
