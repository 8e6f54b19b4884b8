"""Compares saving and loading with transformers, safetensors and PEFT, and across meshes.

Files: transformers writes a random tiny model, sharded or not, in one of three dtypes. Its tensor
files are changed as files of the Hub are: without the base model's prefix, with buffers, with
copies of tied tensors. jaxllm loads and saves them; every tensor must keep its bytes, transformers
must load the saved folder with the same state, and the logits must agree.

Merges: adapters that PEFT writes are merged by both, and so are adapters that jaxllm writes.

Meshes: a training state and a model that Orbax saved on one mesh are restored on three others; all
bytes must be equal. This area needs no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import tiny
from checkpoint_files import (
    LOGITS_CLOSE,
    MERGE_CLOSE,
    bits,
    change_files,
    draw_file,
    draw_lora,
    is_buffer,
    lora_config,
    merge_difference,
    read_tensors,
    token_inputs,
    write_file,
)
from devices import environment
from report import Report, arguments
from tiny_meshes import mesh

import jaxllm
import jaxllm.models
from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.peft import load_adapter, save_adapter
from jaxllm.models.lora import LoraConfig, add_lora, merge_lora
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import tree_shardings
from jaxllm.training.optimizers import OptimizerConfig, make_optimizer
from jaxllm.training.state import TRAINED, TrainState

AREAS = ["files", "merges", "written-merges", "meshes"]
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"data": 4, "tensor": 2},
    {"tensor": 2},
    {"data": 3},
    {},
)
INFO = ("missing_keys", "unexpected_keys", "mismatched_keys")
"""What the reference reports of loading."""
REFUSED = "refused by the reference"
DOCUMENTED = {
    REFUSED: "transformers 4.57 refuses a file that has a head but lacks the base model's prefix; "
    "its names are unambiguous, so jaxllm reads it and writes the same bytes",
}
Draw = Callable[[np.random.Generator, int], dict[str, Any]]
Difference = Callable[[dict[str, Any], Path], str]
"""What differs in a combination, whose files go to a folder; an empty text if nothing does."""


def reference_model(case: dict[str, Any]) -> Any:
    """A model of the reference with random weights in the case's dtype."""
    import torch
    import transformers

    torch.manual_seed(case["seed"])
    config: Any = getattr(transformers, case["config_class"])(**case["config"])
    model = getattr(transformers, case["class"])(config)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) * (0.5 if x.dim() == 1 else x.shape[-1] ** -0.5))
            if x.dim() == 1:
                x += 1
            x.data = x.data.to(getattr(torch, case["dtype"]))  # buffers stay as exact as they are
    return model.eval()


def load_reference(case: dict[str, Any], folder: Path, dtype: str | None = None) -> tuple[Any, Any]:
    import torch
    import transformers

    cls: Any = getattr(transformers, case["class"])
    dtype = dtype or case["dtype"]
    return cls.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)


def reference_logits(model: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    import torch

    with torch.no_grad():
        out = model.eval()(**{name: torch.tensor(x) for name, x in given.items()})
    return first_output(out).numpy()


def first_output(out: Any) -> Any:
    """Logits, or the last hidden states of a model without a head."""
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def own_logits(case: dict[str, Any], folder: Path, given: dict[str, np.ndarray]) -> np.ndarray:
    model = jaxllm.load(
        folder, dtype="float32", param_dtype="float32", architecture=class_of(case)
    )[0]
    return np.asarray(first_output(jax.jit(lambda net: net(**given))(model)))


def state_bits(model: Any) -> dict[str, Any]:
    """Dtype and values of every array of the reference's model."""
    return {
        name: (str(x.dtype), x.detach().float().numpy().tobytes())
        for name, x in model.state_dict().items()
    }


def class_of(case: dict[str, Any]) -> Any:
    """The class of the same name; None: jaxllm's own choice for the file."""
    name = case["class"]
    return getattr(jaxllm.models, name) if name in ("LlamaModel", "GPT2Model") else None


def file_difference(case: dict[str, Any], work: Path) -> str:
    """What differs when a model of the reference is read and saved; empty if nothing does."""
    source, saved = work / "source", work / "saved"
    options = {} if case["shard_bytes"] is None else {"max_shard_size": case["shard_bytes"]}
    original = reference_model(case)
    original.save_pretrained(source, **options)
    expected = reference_logits(original.float(), token_inputs(case))
    change_files(source, case)
    before = {name: x for name, x in read_tensors(source).items() if not is_buffer(name)}
    # Without a head only a tied model can be read as a language model, which is the default.
    tied = case["config"]["tie_word_embeddings"]
    model, _ = jaxllm.load(source, architecture=None if tied else class_of(case))
    jaxllm.save_hf(saved, model, max_shard_bytes=case["saved_shard_bytes"])
    after = read_tensors(saved)
    if before.keys() != after.keys():
        return f"tensor names: {sorted(before.keys() ^ after.keys())}"
    if changed := [name for name in before if bits(before[name]) != bits(after[name])]:
        return f"bytes of {changed}"
    distance = float(np.abs(own_logits(case, source, token_inputs(case)) - expected).max())
    if not distance < LOGITS_CLOSE:
        return f"logits differ by {distance:.2g}"
    loaded = [loaded_state(case, folder) for folder in (source, saved)]
    if loaded[0] != loaded[1]:
        return "what the reference loads from the two folders"
    if REFUSED in loaded:
        return REFUSED
    missing = loaded[1]["missing_keys"] | loaded[1]["mismatched_keys"]
    return f"the reference misses {missing}" if missing else ""


def loaded_state(case: dict[str, Any], folder: Path) -> Any:
    """Bytes of the reference's state, and the keys that it reports; or that it refuses the file."""
    try:
        model, info = load_reference(case, folder)
    except ValueError as error:
        if "state dictionary" not in str(error) or "corrupted" not in str(error):
            raise
        return REFUSED
    return state_bits(model) | {
        name: {key for key in info[name] if not is_buffer(str(key))} for name in INFO
    }


def compare_cases(
    report: Report, area: str, cases: list[dict[str, Any]], difference: Difference
) -> None:
    """Runs each combination in a folder of its own; an exception is a difference."""
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            try:
                what = difference(case, Path(name))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
        record(report, area, case, what)


def record(report: Report, area: str, case: object, what: str) -> None:
    if what in report.documented:
        report.explained(area, what)
    elif what:
        report.differs(area, case, what)
    else:
        report.equal(area)


def write_adapter(case: dict[str, Any], work: Path) -> None:
    """The base model, the adapter of PEFT with random weights, and what PEFT merges."""
    import peft
    import torch

    base = reference_model(case)
    base.save_pretrained(work / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**lora_config(case)))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                x.copy_(torch.randn_like(x) * 0.2)
            elif "lora_magnitude" in name:
                x.mul_(1 + 0.2 * torch.rand_like(x))
            elif "modules_to_save" in name:
                x.add_(0.1 * torch.randn_like(x))
    model.save_pretrained(work / "adapter")
    model.merge_and_unload().save_pretrained(work / "merged")


def merge_of_peft(case: dict[str, Any], work: Path) -> str:
    """What differs between the merges of an adapter that PEFT wrote."""
    write_adapter(case, work)
    model = load_adapter(jaxllm.load(work / "base")[0], work / "adapter")
    jaxllm.save_hf(work / "ours", merge_lora(model))
    return merge_difference(read_tensors(work / "ours"), read_tensors(work / "merged"))


def merge_of_jaxllm(case: dict[str, Any], work: Path) -> str:
    """What differs between the merges of an adapter that jaxllm wrote."""
    import peft

    reference_model(case).save_pretrained(work / "base")
    base = jaxllm.load(work / "base")[0]
    own = case["own"]
    model = add_lora(base, LoraConfig(**own), key=case["seed"])
    rng = np.random.default_rng(case["seed"])
    changed = {
        path: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32)
        for path, x in parameters(model).items()
        if ".lora_" in path
    }
    model = with_parameters(model, {path: jnp.asarray(x) for path, x in changed.items()})
    save_adapter(work / "adapter", model, base_model=str(work / "base"))
    jaxllm.save_hf(work / "ours", merge_lora(model))
    reference = load_reference(case, work / "base")[0]
    loaded = peft.PeftModel.from_pretrained(reference, work / "adapter")
    loaded.merge_and_unload().save_pretrained(work / "merged")
    return merge_difference(read_tensors(work / "ours"), read_tensors(work / "merged"))


def train_state(rng: np.random.Generator, family: str) -> TrainState:
    """The state of a run with random numbers in every array."""
    model = tiny.make(family, vocab_size=64, seed=int(rng.integers(100)))
    config = OptimizerConfig(name=str(rng.choice(["adamw", "adafactor"])))
    made = TrainState.create(model, make_optimizer(config), key=3, ema=bool(rng.integers(2)))

    def draw(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype)

    return jax.tree.map(draw, made)


def mesh_differences(
    rng: np.random.Generator, family: str, source: int, work: Path
) -> list[tuple[dict[str, int], str]]:
    """What differs on each of three other meshes; empty texts where nothing does."""
    whole = train_state(rng, family)
    arrays = {name: getattr(whole, name) for name in TRAINED}
    expected = [bits(x) for x in jax.tree.leaves(arrays)]
    there = mesh(**MESHES[source])
    dtype = rng.choice(["float32", "bfloat16"])
    net = jax.tree.map(lambda x: x.astype(dtype), whole.model).with_card(whole.model.card)
    jaxllm.save_orbax(work / "model", put_tree(net, there))
    targets = rng.permutation([i for i in range(len(MESHES)) if i != source])[:3]
    found = []
    with RunCheckpoints(work / "run", on_problem=sys.exit) as checkpoints:
        checkpoints.save(1, put_tree(arrays, there), {"mesh": MESHES[source]})
        for target in targets.tolist():
            here = mesh(**MESHES[target])
            shardings = tree_shardings(arrays, here)
            shapes = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, shardings
            )
            restored, _, _ = checkpoints.restore(target=shapes)
            pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True)
            wrong = ""
            if [bits(x) for x in jax.tree.leaves(restored)] != expected:
                wrong = "bytes of the state"
            elif not all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in pairs):
                wrong = "shardings of the state"
            loaded = jaxllm.load_orbax(work / "model", mesh=here)[0]
            ours, theirs = parameters(net), parameters(loaded)
            if [
                p for p in ours if bits(ours[p]) != bits(theirs[p])
            ] or ours.keys() != theirs.keys():
                wrong += " bytes of the model"
            found.append((MESHES[target], wrong))
    return found


def compare_meshes(report: Report, count: int, seed: int) -> None:
    families = ("llama", "gpt2", "t5", "qwen3")
    for number in range(-(-count // 3)):
        rng = np.random.default_rng([seed, 3, number])
        family, source = families[number % len(families)], number % len(MESHES)
        with tempfile.TemporaryDirectory() as name:
            for target, wrong in mesh_differences(rng, family, source, Path(name)):
                case = {"family": family, "from": MESHES[source], "to": target}
                record(report, "meshes", case, wrong)


WITH_REFERENCE: dict[str, tuple[Draw, tuple[int, ...], Difference]] = {
    "files": (draw_file, (), file_difference),
    "merges": (draw_lora, (1,), merge_of_peft),
    "written-merges": (draw_lora, (2,), merge_of_jaxllm),
}
"""Area -> what draws its combinations, their random numbers, and what finds a difference."""
STORED_FILES, STORED_MERGES = (1, 6, 24), (5, 11)
"""Numbers of combinations that are stored: buffers, copies, missing prefixes, mixed dtypes and
shards; DoRA, rsLoRA and single layers."""


def store_samples(seed: int) -> None:
    """Writes a few files of the reference with its logits, and adapters with PEFT's merges."""
    folder = helpers.SAMPLES / "save_load"
    shutil.rmtree(folder, ignore_errors=True)
    for number in STORED_FILES:
        case = draw_file(np.random.default_rng([seed, number]), number)
        place = folder / f"file_{number}"
        model = reference_model(case)
        model.save_pretrained(place, max_shard_size=case["shard_bytes"] or "1GB")
        change_files(place, case)
        np.savez_compressed(
            place / "logits.npz", logits=reference_logits(model.float(), token_inputs(case))
        )
        (place / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    for number in STORED_MERGES:
        case = draw_lora(np.random.default_rng([seed, 1, number]), number)
        place = folder / f"merge_{number}"
        write_adapter(case, place)
        (place / "adapter" / "README.md").unlink(missing_ok=True)
        base, merged = read_tensors(place / "base"), read_tensors(place / "merged")
        shutil.rmtree(place / "merged")
        changed = {name: x for name, x in merged.items() if bits(x) != bits(base[name])}
        write_file(place / "changed.safetensors", changed)


def main() -> int:
    options = arguments(__doc__ or "", AREAS)
    if jax.device_count() < 8:  # a process counts its devices once
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(8))
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    report, count, seed = Report(DOCUMENTED), options.count or 48, options.seed
    print(f"logits within {LOGITS_CLOSE}, merged weights within {MERGE_CLOSE}", flush=True)
    for area in options.area:
        if area == "meshes":
            compare_meshes(report, count, seed)
        else:
            draw, stream, difference = WITH_REFERENCE[area]
            rngs = [np.random.default_rng([seed, *stream, number]) for number in range(count)]
            cases = [draw(rng, number) for number, rng in enumerate(rngs)]
            compare_cases(report, area, cases, difference)
    if options.store:
        store_samples(seed)
    return report.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
