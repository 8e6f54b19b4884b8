"""``jaxllm verify MODEL``: compares the logits of a checkpoint with those of transformers.

It also says what the tokenizer files of a folder state differently. For the logits, both load the
same files and run the same prompts, one at a time: jaxllm in float32, transformers in float64, so
that only jaxllm's rounding is measured. Only this comparison needs torch and transformers.

transformers gets a copy of weights that are neither GGUF nor its own safetensors, since version 5
reads no msgpack and pickles only with recent versions of torch.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxllm import load
from jaxllm.checkpoint.gguf.split import part_paths
from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.load import gguf_in
from jaxllm.checkpoint.safetensors import INDEX, SINGLE, SafetensorsFile
from jaxllm.checkpoint.weight_files import weight_files
from jaxllm.cli.options import add_adapter_flag, add_model
from jaxllm.cli.process import Parser, command
from jaxllm.common.errors import CheckpointError, InputError, UnsupportedError
from jaxllm.common.hardware import device_report
from jaxllm.common.optional_packages import require
from jaxllm.common.progress import Reporter
from jaxllm.models.model import BaseModel, Model
from jaxllm.saving import export_checkpoint
from jaxllm.tokenizers.contradictions import contradictions

TOLERANCE = 1e-4
MAX_PROMPT_TOKENS = 64
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "translate English to German: The house is wonderful.",
    "Ωmega, naïve café, 東京, 😀 and 1,234.5 + 6 = ",
)


@dataclass(frozen=True)
class Distance:
    """Difference between our outputs and the reference's.

    Attributes:
        positions: number of positions compared.
        max_abs: largest absolute difference.
        relative: `max_abs` divided by the standard deviation of the reference's outputs over all
            prompts.
        kl_mean, kl_max: KL divergence of the next-token distributions, reference to ours.
        top1: share of positions where both have the same most likely token.
    """

    positions: int
    max_abs: float
    relative: float
    kl_mean: float
    kl_max: float
    top1: float


def distance(
    ours: Float[np.ndarray, "T V"], reference: Float[np.ndarray, "_ _"], std: float
) -> Distance:
    """Compares outputs in float64; ``std`` is the divisor of the relative difference.

    >>> d = distance(np.array([[1.0, 3.0]]), np.array([[1.0, 3.5]]), std=2.0)
    >>> d.max_abs, d.relative, round(d.kl_mean, 4), d.top1
    (0.5, 0.25, 0.0101, 1.0)
    """
    ours, reference = ours.astype(np.float64), reference.astype(np.float64)
    if ours.shape != reference.shape:
        raise InputError(f"our outputs have shape {ours.shape}, the reference's {reference.shape}")
    difference = float(np.abs(ours - reference).max())
    p, q = _log_softmax(reference), _log_softmax(ours)
    kl = (np.exp(p) * (p - q)).sum(-1)
    return Distance(
        positions=len(ours),
        max_abs=difference,
        relative=difference / max(std, 1e-30),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float((ours.argmax(-1) == reference.argmax(-1)).mean()),
    )


def _log_softmax(x: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _parser(program: str) -> Parser:
    parser = Parser(program, description="Compare a checkpoint's logits with transformers'.")
    add_model(parser)
    add_adapter_flag(parser)
    parser.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"largest |dlogit| / std of the reference's logits (default {TOLERANCE})",
    )
    parser.add_argument(
        "--reference-dtype",
        choices=("float64", "float32"),
        default="float64",
        help="float32 halves the reference's memory, and adds its rounding to the difference",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.tolerance > 0:
        raise InputError(f"--tolerance must be above 0, but is {arguments.tolerance}")
    path, precision = resolve(arguments.model), arguments.reference_dtype
    folder = resolve(path, weights=False)
    for line in contradictions(folder) if folder.is_dir() else ():
        print(f"tokenizer files disagree: {line}", flush=True)
    torch, transformers = _import_reference()
    peft = (
        None if arguments.adapter is None else require("peft", extra="verify", purpose="adapters")
    )

    reporter = Reporter()
    for line in device_report():
        reporter.say(line)
    with jax.default_matmul_precision("highest"):
        model, tokenizer = load(
            path, dtype="float32", param_dtype="float32", adapter=arguments.adapter
        )
        with tempfile.TemporaryDirectory() as new:
            copy = _readable_copy(path, Path(new))
            reference = _load_reference(copy, model, transformers)
        if peft is not None:
            adapted = peft.PeftModel.from_pretrained(reference, str(arguments.adapter))
            reference = adapted.merge_and_unload()
        is_xglm = model.config.model_type == "xglm"  # whose mask overflows in float64
        # The option casts to float32, which torch cannot mix with float64.
        if is_xglm or getattr(model.config, "reorder_and_upcast_attn", False):
            precision = "float32"
        reference = reference.to(getattr(torch, precision)).eval()
        prompts = _prompts(arguments.prompt, model, tokenizer)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
        print(
            f"{path}: {type(model).__name__}, {parameters / 1e6:.1f} M parameters, in float32, "
            f"against transformers {transformers.__version__} in {precision}"
        )
        calls = [_inputs(ids, model) for ids in prompts]
        ours = [_outputs(model(**call)) for call in calls]
        theirs = [_theirs(reference, call, torch, precision) for call in calls]
    # Over all prompts, since a classifier with one label gives a single number per prompt.
    std = float(np.concatenate(theirs).astype(np.float64).std())
    distances = [distance(*pair, std) for pair in zip(ours, theirs, strict=True)]
    print("prompt  tokens    max |d|      / std    KL mean     KL max    top-1")
    for number, (ids, row) in enumerate(zip(prompts, distances, strict=True), start=1):
        print(f"{number:>6}  {len(ids):>6}  {_columns(row, model)}")
    worst = np.max([row.relative for row in distances])  # NaN if any is NaN, unlike Python's max
    good = worst <= arguments.tolerance
    print(
        f"{'OK' if good else 'BEYOND THE TOLERANCE'}: max |d| / std is {worst:.2e}, "
        f"the tolerance {arguments.tolerance:.0e}"
    )
    if not good and (note := _known_difference(model, transformers.__version__)):
        print(note)
    return 0 if good else 1


def _known_difference(model: Model[Any], version: str) -> str | None:
    """Describes a known error of the reference, if it applies to this model."""
    own_head = not getattr(model.config, "tie_word_embeddings", True)
    if getattr(model.config, "bias_per_layer", False) and own_head and int(version[0]) >= 5:
        return (
            f"transformers {version} scales the decoder's output although umT5's own head is not "
            "tied; the original does not, nor does transformers 4.57: compare with that"
        )
    return None


def _columns(row: Distance, model: Model[Any]) -> str:
    text = f"{row.max_abs:>9.2e}  {row.relative:>9.2e}"
    if isinstance(model, BaseModel):  # hidden states are not a distribution
        return text
    return f"{text}  {row.kl_mean:>9.2e}  {row.kl_max:>9.2e}  {row.top1:>7.2%}"


def _import_reference() -> tuple[Any, Any]:
    torch, transformers = (
        require(name, extra="verify", purpose="comparisons with transformers")
        for name in ("torch", "transformers")
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def _readable_copy(path: Path, folder: Path) -> Path:
    """The checkpoint itself if transformers opens it, else a copy as safetensors in `folder`.

    Raises:
        CheckpointError: bytes of a zip file have another checksum than its directory says.
    """
    if (gguf_in(path) or path).suffix.lower() == ".gguf":
        return path
    files = weight_files(path)
    first = files[0] if files else path
    is_flax = first.name == SINGLE and SafetensorsFile(first).metadata.get("format") == "flax"
    if first.name in (SINGLE, INDEX) and not is_flax:
        return first.parent
    for file in filter(zipfile.is_zipfile, files):
        with zipfile.ZipFile(file) as members:
            damaged = members.testzip()
        if damaged:
            raise CheckpointError(
                f"{file}: {damaged}: its checksum is not that of its bytes; get the file again"
            )
    export_checkpoint(path, folder)
    return folder


def _load_reference(path: Path, model: Model[Any], transformers: Any) -> Any:
    """Loads the same checkpoint as a torch module, in the dtype that transformers chooses."""
    endings = {
        "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
        "MTModel": "AutoModelForSeq2SeqLM",  # Marian
        "EncoderModel": "AutoModelForTextEncoding",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
    }
    name, default = type(model).__name__, "AutoModelForCausalLM"
    if isinstance(model, BaseModel):
        default = "AutoModel"  # hidden states
    auto = next((auto for ending, auto in endings.items() if name.endswith(ending)), default)
    source = {"pretrained_model_name_or_path": str(path)}
    path = gguf_in(path) or path
    if path.suffix == ".gguf":
        if len(part_paths(path)) > 1:
            raise UnsupportedError(
                f"{path}: transformers does not join the parts of a GGUF file; join them with "
                "llama-gguf-split --merge"
            )
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return getattr(transformers, auto).from_pretrained(**source, attn_implementation="eager")


def _prompts(texts: list[str] | None, model: Model[Any], tokenizer: Any) -> list[list[int]]:
    """Token ids of the user's prompts or the default ones; random ids without a tokenizer.

    Sorted by length: transformers' dynamic RoPE keeps the frequencies of the longest prompt so far.
    """
    limit = min(
        MAX_PROMPT_TOKENS, getattr(model.config, "max_positions", None) or MAX_PROMPT_TOKENS
    )
    if tokenizer is not None:
        batches = [tokenizer([text], return_tensors="np") for text in texts or PROMPTS]
        rows = [batch.input_ids[0, :limit].tolist() for batch in batches]
        return sorted(rows, key=len)
    if texts:
        raise InputError("--prompt: the checkpoint has no tokenizer; leave it out for random ids")
    rng = np.random.default_rng(0)
    lengths = (1, max(1, limit // 3), limit)
    # From the padding token, some classes of transformers compute positions or lengths.
    ids = np.setdiff1d(np.arange(model.config.vocab_size), [model.config.pad_token_id or 0])
    return [rng.choice(ids, length).tolist() for length in lengths]


def _inputs(ids: list[int], model: Model[Any]) -> dict[str, np.ndarray]:
    """Arguments of a forward call, with the names that both libraries share."""
    inputs = {"input_ids": np.asarray([ids]), "attention_mask": np.ones((1, len(ids)), int)}
    if model.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        if start is None:
            start = ids[-1]  # mBART's first token is a language, with which its inputs end
        inputs["decoder_input_ids"] = np.asarray([[start, *ids[:-1]]])
    elif getattr(model.config, "add_cross_attention", False):
        shape = (1, 5, model.config.n_embd)
        states = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        inputs["encoder_hidden_states"] = states
    return inputs


def _theirs(
    model: Any, inputs: dict[str, np.ndarray], torch: Any, precision: str
) -> Float[np.ndarray, "T V"]:
    arrays = {k: x.astype(precision) if x.dtype.kind == "f" else x for k, x in inputs.items()}
    try:
        with torch.no_grad():
            return _outputs(model(**{name: torch.from_numpy(x) for name, x in arrays.items()}))
    except Exception as error:
        raise UnsupportedError(
            f"transformers cannot run this checkpoint: {type(error).__name__}: {error}"
        ) from error


def _outputs(result: Any) -> Float[np.ndarray, "T V"]:
    """Logits, or an encoder's last hidden states, of a batch of one."""
    logits = getattr(result, "logits", None)
    x = np.asarray(result.last_hidden_state if logits is None else logits)
    return x.reshape(-1, x.shape[-1])


main = command(_parser, _run, "jaxllm verify")
"""Returns 0 within the tolerance, 1 beyond it, 2 for an error."""
