"""Make the parity data: tiny random models and what Hugging Face transformers computes with them.

    python tests/data/make_parity.py            # the cases of the installed transformers version
    python tests/data/make_parity.py --only llama_bias t5_relu
    python tests/data/make_parity.py --check    # recompute all cases, print the largest differences
    python tests/data/make_parity.py --table    # print the table of tests/data/parity/README.md

Run it by hand under an environment with torch and transformers (never under the tests'). The cases
are declared in parity_maker/; each names the transformers version that is its reference.

Every weight is drawn from a generator seeded by the case and the tensor's name. The weight of the
last norm is then scaled so that the logits at real positions have standard deviation 2: with the
library's own initialisation logits are nearly flat and a comparison of them would prove nothing.
Every call runs on a freshly loaded model, since dynamic RoPE keeps state between calls.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from parity_maker import CASES
from parity_maker.inputs import Beams, Case, Forward, Generate, Grad, Rope, random_state
from parity_maker.layouts import mixtral_name, split_experts
from parity_maker.tables import tables
from safetensors.torch import save_file

ROOT = Path(__file__).parent / "parity"
LOGITS_STD = 2.0
MIN_MARGIN = 0.02  # of greedy runs: far above float32 noise, so that tokens are comparable


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def tensors(inputs: dict) -> dict:
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}


def draw(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One weight, of a size that keeps activations near 1 whatever the family's layout."""
    noise = np.random.RandomState(zlib.crc32(f"{case.name}:{name}".encode())).randn(*shape)
    if name.endswith("bias"):
        return 0.3 * noise
    leaf = name.rsplit(".", 2)[-2]
    if len(shape) == 1:  # every norm
        return 1 + 0.2 * noise
    if leaf == "relative_attention_bias":
        return noise
    # A large tied one only copies its input.
    if leaf in ("embed_tokens", "shared", "wte", "word_embeddings"):
        return 0.3 * noise
    if leaf == "wpe":
        return 0.6 * noise
    fan_in = shape[0] if case.family == "gpt2" and leaf.startswith("c_") else shape[-1]
    if case.family == "gpt2" and leaf == "q_attn":
        fan_in = shape[0]
    gain = 1.3 if leaf not in ("lm_head", "score") else 1.0
    if case.family == "t5" and leaf == "q":  # T5 folds 1/sqrt(d_kv) into the weights
        gain /= case.config["d_kv"] ** 0.5
    if case.family == "gpt_neo" and leaf == "q_proj":  # its products are not scaled
        gain /= (case.config["hidden_size"] / case.config["num_heads"]) ** 0.5
    return gain * noise / fan_in**0.5


def model_class(case: Case) -> type:
    return getattr(transformers, case.architecture)


def save_weights(case: Case, folder: Path, weights: dict[str, np.ndarray]) -> None:
    """Write model.safetensors in the case's layout (renamed keys, extra buffers)."""
    laid_out = case.layout(weights, case.config)
    as_torch = {k: torch.tensor(v) for k, v in laid_out.items()}
    save_file(as_torch, folder / "model.safetensors", metadata={"format": "pt"})


def load(case: Case, folder: Path):
    # torch's grouped products take sizes that are multiples of 4 only.
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in case.config else {}
    model, info = model_class(case).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **experts,
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{case.name}: {info}")
    return model.eval()


def build(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [case.architecture], **case.config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    skeleton = model_class(case)(transformers.AutoConfig.from_pretrained(folder))
    weights = {
        name: draw(case, name, tuple(value.shape)).astype(np.float32)
        for name, value in skeleton.state_dict().items()
        if name not in case.absent
    }
    save_weights(case, folder, weights)
    # A norm of Gemma multiplies by 1 + weight, so that the factor is found step by step.
    for _ in range(8 if "gemma" in case.family else 1):
        factor = np.float32(LOGITS_STD / output_std(case, folder))
        for name in case.final_norm:
            weights[name] = weights[name] * factor
        save_weights(case, folder, weights)


def first_forward(case: Case) -> dict:
    return next(call.inputs for call in case.calls.values() if isinstance(call, Forward))


def output_std(case: Case, folder: Path) -> float:
    """Standard deviation of the first call's logits (or last hidden state) at real positions."""
    inputs = first_forward(case)
    with torch.no_grad():
        out = load(case, folder)(**tensors(inputs))
    values = array(out.logits if "logits" in out else out.last_hidden_state)
    mask = real_positions(inputs)
    if mask is not None and mask.shape == values.shape[:2]:
        values = values[mask]
    return float(values.std())


def real_positions(inputs: dict) -> np.ndarray | None:
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return None if mask is None else np.asarray(mask).astype(bool)


def flatten(outputs) -> dict[str, np.ndarray]:
    flat = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            flat[name] = array(value)
        elif isinstance(value, tuple) and name != "past_key_values":
            flat |= {f"{name}/{i}": array(v) for i, v in enumerate(value) if v is not None}
    return flat


def run_forward(model, call: Forward) -> dict[str, np.ndarray]:
    extra = {}
    if call.hidden:
        extra["output_hidden_states"] = True
    if call.attentions:
        extra["output_attentions"] = True
    with torch.no_grad():
        outputs = flatten(model(**tensors(call.inputs), **extra))
    # T5Gemma gives its last hidden state under this name unless it is asked for all.
    return {k: x for k, x in outputs.items() if call.hidden or "hidden_states/" not in k}


def run_grad(model, call: Grad) -> dict[str, np.ndarray]:
    """Loss and its gradients, dropout off; a tied weight's gradient is the sum over its uses."""
    loss = model(**tensors(call.inputs)).loss
    loss.backward()
    parameters = dict(model.named_parameters())
    grads = split_experts({name: array(parameters[name].grad) for name in call.parameters})
    rename = mixtral_name if model.config.model_type == "mixtral" else str
    return {"loss": array(loss)} | {f"grad/{rename(name)}": grad for name, grad in grads.items()}


def run_rope(model, call: Rope) -> dict[str, np.ndarray]:
    positions = torch.from_numpy(call.inputs["position_ids"])
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    return {"cos": array(cos), "sin": array(sin)}


def run_generate(model, call: Generate) -> dict[str, np.ndarray]:
    """Greedy tokens with EOS disabled, the logits of every step, and their top-1/top-2 gaps."""
    model.generation_config.eos_token_id = None
    model.config.output_router_logits = False  # its loss fails in a step with a cache
    out = model.generate(
        **tensors(call.inputs),
        do_sample=False,
        num_beams=1,
        use_cache=call.use_cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(out.logits, 1)
    top = logits.topk(2, -1).values
    return {
        "sequences": array(out.sequences),
        "logits": array(logits),
        "margins": array(top[..., 0] - top[..., 1]),
    }


def run_beams(model, call: Beams) -> dict[str, np.ndarray]:
    """The best two of three beams, with their scores."""
    model.config.output_router_logits = False  # as in run_generate
    out = model.generate(
        **tensors(call.inputs),
        do_sample=False,
        num_beams=3,
        num_return_sequences=2,
        length_penalty=0.7,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return {"sequences": array(out.sequences), "sequences_scores": array(out.sequences_scores)}


def choose_beams(case: Case, folder: Path, call: Beams) -> tuple[dict, dict]:
    """Chooses the batch of sources whose best and second beams differ most in score."""
    best, most = None, -1.0
    for seed in range(12):
        inputs = call.make(random_state(f"{case.name}:beams:{seed}"))
        outputs = run_call(case, folder, replace(call, inputs=inputs))
        gap = float(-np.diff(outputs["sequences_scores"].reshape(-1, 2)).max())
        if gap > most:
            best, most = (inputs, outputs), gap
    return best


def run_call(case: Case, folder: Path, call) -> dict[str, np.ndarray]:
    model = load(case, folder)
    runners = {Forward: run_forward, Grad: run_grad, Rope: run_rope}
    runners |= {Generate: run_generate, Beams: run_beams}
    return runners[type(call)](model, call)


def choose_prompt(case: Case, folder: Path, call: Generate) -> tuple[dict, dict]:
    """Chooses, of 24 batches of prompts, the one whose greedy rows vary most without a near tie.

    Small random models fall into repeating a token, and a test on such rows would see little.
    """
    best, most = None, (False, 0)
    for seed in range(24):
        inputs = call.make(random_state(f"{case.name}:generate:{seed}"))
        outputs = run_call(case, folder, replace(call, inputs=inputs))
        new = outputs["sequences"][:, -int(inputs["max_new_tokens"]) :]
        distinct = sum(len(set(row)) for row in new.tolist())
        if (rank := (bool(outputs["margins"].min() >= MIN_MARGIN), distinct)) > most:
            best, most = (inputs, outputs), rank
    return best


def store(folder: Path, results: dict[str, tuple[dict, dict]], meta: dict) -> None:
    """Write expected.npz: <call>/in/<argument>, <call>/out/<output>, and meta (a json string)."""
    flat = {"meta": np.array(json.dumps(meta))}
    for call, (inputs, outputs) in results.items():
        flat |= {f"{call}/in/{k}": np.asarray(v) for k, v in inputs.items()}
        flat |= {f"{call}/out/{k}": v for k, v in outputs.items()}
    for name, value in flat.items():
        if value.dtype.kind == "f":
            flat[name] = value.astype(np.float32)
            if not np.isfinite(value).all():
                raise SystemExit(f"{folder.name}: {name} is not finite")
    np.savez_compressed(folder / "expected.npz", **flat)


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def make(case: Case) -> None:
    folder = ROOT / case.name
    if folder.exists():
        shutil.rmtree(folder)
    build(case, folder)
    results = {}
    for name, call in case.calls.items():
        if isinstance(call, Generate):
            results[name] = choose_prompt(case, folder, call)
        elif isinstance(call, Beams):
            results[name] = choose_beams(case, folder, call)
        else:
            results[name] = call.inputs, run_call(case, folder, call)
    std = output_std(case, folder)
    if std < 1:
        raise SystemExit(f"{case.name}: logits std {std}")
    meta = {
        "name": case.name,
        "architecture": case.architecture,
        "covers": case.covers,
        "output_std": round(std, 3),
        **versions(),
    }
    margins = [out["margins"].min() for _, out in results.values() if "margins" in out]
    if margins:
        meta["min_margin"] = round(float(min(margins)), 4)
    store(folder, results, meta)
    print(f"{case.name:28} std {std:.2f} margin {meta.get('min_margin', '-')}", flush=True)


def make_sharded() -> None:
    """A model that save_pretrained cut in shards, in float32 and in bfloat16."""
    case = next(c for c in CASES if c.name == "llama_untied")
    source = load(case, ROOT / case.name)
    plain = case.calls["plain"]
    for name, dtype, size in (("f32", torch.float32, "9KB"), ("bf16", torch.bfloat16, "5KB")):
        folder = ROOT / "sharded" / name
        if folder.exists():
            shutil.rmtree(folder)
        source.to(dtype).save_pretrained(folder, max_shard_size=size)
        shards = sorted(p.name for p in folder.glob("model-*.safetensors"))
        if len(shards) < 3:
            raise SystemExit(f"sharded/{name}: {shards}")
        outputs = run_forward(load(case, folder), Forward(plain.inputs))
        covers = f"{len(shards)} shards with an index, {name}; logits in float32 from these weights"
        meta = {"name": f"sharded/{name}", "architecture": case.architecture, "covers": covers}
        meta |= {"output_std": round(float(outputs["logits"].std()), 3), **versions()}
        store(folder, {"plain": (plain.inputs, outputs)}, meta)


def make_tables() -> None:
    """Activations and T5's relative-position buckets, without a model."""
    folder = ROOT / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    covers = "every hidden_act on a grid; T5 relative position buckets, 6 settings, -400..400"
    meta = {"name": "tables", "architecture": "", "covers": covers, **versions()}
    store(folder, tables(), meta)


def gap(a: np.ndarray, b: np.ndarray, mask: np.ndarray | None) -> float:
    """Largest difference at real positions, of [B, T, ...] or of attentions [B, heads, T, S]."""
    difference = np.abs(a - b)
    if mask is not None and a.shape[:2] == mask.shape:
        difference = difference[mask]
    elif mask is not None and a.ndim == 4 and a.shape[::2] == mask.shape:
        difference = difference.swapaxes(1, 2)[mask]
    return float(difference.max())


def check(names: list[str]) -> None:
    """Recompute stored cases under the installed version; print the largest output difference."""
    for case in CASES:
        if names and case.name not in names:
            continue
        folder, worst = ROOT / case.name, {}
        with np.load(folder / "expected.npz") as stored:
            made_by = json.loads(str(stored["meta"]))["transformers"]
            for name, call in case.calls.items():
                try:
                    if isinstance(call, Generate | Beams):
                        keys = [k for k in stored if k.startswith(f"{name}/in/")]
                        inputs = {k.split("/in/")[1]: stored[k] for k in keys}
                        inputs["max_new_tokens"] = int(inputs["max_new_tokens"])
                        call = replace(call, inputs=inputs)
                    outputs = run_call(case, folder, call)
                except Exception as error:
                    worst[name] = f"{type(error).__name__}: {str(error)[:80]}"
                    continue
                mask = real_positions(call.inputs)
                gaps = {k: gap(v, stored[f"{name}/out/{k}"], mask) for k, v in outputs.items()}
                worst[name] = max(gaps.values())
        failed = {k: v for k, v in worst.items() if isinstance(v, str) or v > 1e-4}
        print(f"{case.name:28} made by {made_by}: {failed or 'agrees'}", flush=True)


def table() -> None:
    print("| case | covers | calls | output std | smallest margin | model KB | data KB | version |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(ROOT.rglob("expected.npz")):
        with np.load(path) as stored:
            meta = json.loads(str(stored["meta"]))
            calls = ", ".join(dict.fromkeys(k.split("/")[0] for k in stored if k != "meta"))
        if meta["name"] == "tables":
            calls = "one per activation, one per bucket setting"
        model = sum(p.stat().st_size for p in path.parent.glob("*.safetensors")) / 1024
        data = path.stat().st_size / 1024
        row = [
            meta["name"],
            meta["covers"],
            calls,
            meta.get("output_std", ""),
            meta.get("min_margin", ""),
        ]
        print(
            f"| {' | '.join(map(str, row))} | {model:.0f} | {data:.0f} | {meta['transformers']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.table:
        return table()
    if args.check:
        return check(args.only)
    mine = [c for c in CASES if c.version == transformers.__version__]
    for case in mine:
        if not args.only or case.name in args.only:
            make(case)
    if not args.only and any(c.name == "llama_untied" for c in mine):
        make_sharded()
        make_tables()


if __name__ == "__main__":
    main()
