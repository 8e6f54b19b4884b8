"""Options that commands share: generation fields, how a model is read, where programs are kept."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllm import load
from jaxllm.checkpoint.hub import BUNDLED, resolve
from jaxllm.checkpoint.load import compute_dtype_of
from jaxllm.cli.process import Flags, add_flags, path
from jaxllm.common.compiling import enable_compile_cache
from jaxllm.common.errors import InputError, RunError, UnsupportedError, quoted
from jaxllm.common.hardware import device_report
from jaxllm.common.precision import PRECISIONS
from jaxllm.common.progress import Reporter, reports_to
from jaxllm.generation.inputs.values import boolean
from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.settings.fields import Field
from jaxllm.models.joined import arranged_for_inference
from jaxllm.models.quantize import FORMATS, KEEP

STREAM = "-"
"""Name of stdin and of stdout."""
POOLINGS = ("auto", "mean", "last", "cls")
DTYPE_NAMES = ("float32", "bfloat16", "float16")


def config_field(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE; the value is JSON, or else a string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


_MODEL_FLAGS: Flags = {
    "--dtype": {
        "choices": DTYPE_NAMES,
        "help": "dtype of the computation (default: the checkpoint's, float32 on a CPU)",
    },
    "--param-dtype": {
        "choices": DTYPE_NAMES,
        "help": "dtype of the weights (default: the checkpoint's)",
    },
    "--matmul-precision": {
        "choices": PRECISIONS,
        "help": "precision of matrix products in float32 on a TPU or GPU (default: highest)",
    },
    "--quantize": {
        "choices": (*FORMATS, KEEP),
        "help": "keep the weights as integers, which need less memory",
    },
    "--float-embeddings": {
        "dest": "quantize_embeddings",
        "action": "store_false",
        "help": "leave the token embedding and the LM head as floats, with --quantize",
    },
    "--allow-nonfinite": "accept weights that are NaN or infinite",
    "--architecture NAME": "the class that reads the model, such as T5EncoderModel",
    "--config KEY=VALUE": {
        "type": config_field,
        "action": "append",
        "default": [],
        "help": "a value for a field of config.json; null removes the field. May be repeated",
    },
}
"""Options that say how a model is read, for `add_flags`."""


def add_field_flags(parser: argparse.ArgumentParser, *, in_server: bool = False) -> None:
    """Adds an option for each generation field; boolean fields also get ``--no-...``.

    Values are only parsed here; the library checks them. Fields that a command (or a server, with
    `in_server`) cannot use are parsed too, so that an error names them, but ``--help`` hides them.
    """
    group = parser.add_argument_group(
        "generation fields",
        "Hugging Face's names. Lists are JSON or comma separated; `none` switches a field off.",
    )
    for field in FIELDS.values():
        if field.metadata:
            continue
        flag = "--" + field.name.replace("_", "-")
        # Commands have another default of max_length than `generate`.
        has_default = field.default not in (None, False, ()) and field.name != "max_length"
        text = f"{field.doc} ({field.default})" if has_default else field.doc
        is_shown = _is_usable(field, in_server)
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%") if is_shown else argparse.SUPPRESS,
        }
        if field.check is boolean:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            group.add_argument(flag, type=parse_value, metavar="VALUE", **options)


def _is_usable(field: Field, in_server: bool) -> bool:
    supported = field.supported or (field,)  # a value other than the default
    if field.library_only or field.record or not any(v and v != field.default for v in supported):
        return False
    # Each request to a server sets its length.
    is_served = field.slots and field.name not in ("max_length", "max_new_tokens")
    return not in_server or is_served


def generation_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generation fields set on the command line."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}


def parse_value(text: str) -> Any:
    """Parses a value: JSON, comma-separated integers, ``none``, or else a string.

    >>> [parse_value(text) for text in ("0.7", "2,32000", "[[5, 6]]", "none", "never")]
    [0.7, [2, 32000], [[5, 6]], None, 'never']
    """
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return int_list(text)
    except ValueError:
        return text


def int_list(text: str) -> list[int]:
    """Parses comma-separated integers, with optional spaces and brackets.

    >>> int_list("[1, 2]"), int_list("7")
    ([1, 2], [7])
    """
    text = text.strip()
    has_brackets = text.startswith("[") and text.endswith("]")
    return [int(part) for part in (text[1:-1] if has_brackets else text).split(",")]


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    """Adds the model itself: as ``--model``, or as the command's argument ``model``."""
    text = f"the model: a folder, a .gguf file or a Hub id (default: {BUNDLED}, the bundled model)"
    options: dict[str, Any] = {} if name.startswith("--") else {"nargs": "?"}
    parser.add_argument(name, metavar="MODEL", default=BUNDLED, help=text, **options)


def add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        type=path,
        metavar="FOLDER",
        help="the folder of a LoRA adapter, in PEFT's format; one at most",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how a model is read and where its programs are kept."""
    add_adapter_flag(parser)
    add_flags(parser, _MODEL_FLAGS)
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--compile-cache",
        type=path,
        metavar="FOLDER",
        help="the folder that keeps compiled programs for the next start",
    )
    cache.add_argument(
        "--no-compile-cache",
        dest="keep_compiled",
        action="store_false",
        help="do not keep compiled programs",
    )


def check_seed(seed: int | None) -> None:
    """Raises InputError unless ``--seed`` has at most 32 bits; JAX drops higher ones."""
    if seed is not None and not 0 <= seed < 2**32:
        raise InputError(f"--seed must be from 0 to 2**32 - 1, but is {quoted(seed)}")


def model_options(arguments: argparse.Namespace, platform: str) -> dict[str, Any]:
    """The options of `add_model_flags`, by which a resumed job knows that the model is the same.

    All of them change results. Except for the dtypes, those that are not used are left out. The
    compute dtype is the one that is chosen if none is given, which depends on the platform.
    """
    options = {
        "--adapter": None if arguments.adapter is None else str(arguments.adapter.absolute()),
        "--matmul-precision": arguments.matmul_precision,
        "--quantize": arguments.quantize,
        "--float-embeddings": not arguments.quantize_embeddings,
        "--allow-nonfinite": arguments.allow_nonfinite,
        "--architecture": arguments.architecture,
        "--config": dict(arguments.config),
    }
    return {
        "--dtype": arguments.dtype or compute_dtype_of(resolve(arguments.model), platform),
        "--param-dtype": arguments.param_dtype,
        **{name: value for name, value in options.items() if value},
    }


def check_model_flags(arguments: argparse.Namespace) -> None:
    """Raises InputError for an option that needs another one, or a field that is given twice."""
    if not arguments.quantize_embeddings and arguments.quantize is None:
        raise InputError("--float-embeddings has no effect without --quantize")
    for field, count in Counter(field for field, _ in arguments.config).items():
        if count > 1:
            raise InputError(f"--config {field}: given {count} times, but it takes one value")


def load_named(
    arguments: argparse.Namespace,
    mesh: Mesh | None,
    reporter: Reporter,
    *,
    needs_tokenizer: str | None = None,
    chat_flag: str | None = None,
    while_loading: Callable[[Any, Any], object] | None = None,
) -> tuple[Any, Any]:
    """Loads the model of `add_model` and its tokenizer as the options of `add_model_flags` say.

    Compiled programs are kept, unless the options say otherwise or the folder is not writable.

    Args:
        needs_tokenizer: what needs the tokenizer, such as "a server". None: there may be none.
        chat_flag: the option that needs a chat template, if it is given.
        while_loading: as in `jaxllm.load`.

    Raises:
        JaxLLMError: as `jaxllm.load`.
    """
    if arguments.keep_compiled:
        try:
            enable_compile_cache(arguments.compile_cache)
        except RunError as problem:
            reporter.say(str(problem))
    check_model_flags(arguments)
    label = f"loading {Path(arguments.model).absolute().name}"
    with reports_to(reporter), reporter.phase(label) as update:
        model, tokenizer = load(
            arguments.model,
            adapter=arguments.adapter,
            dtype=arguments.dtype,
            param_dtype=arguments.param_dtype,
            quantize=arguments.quantize,
            quantize_embeddings=arguments.quantize_embeddings,
            allow_nonfinite=arguments.allow_nonfinite,
            architecture=arguments.architecture,
            config=dict(arguments.config),
            mesh=mesh,
            progress=update,
            while_loading=None
            if while_loading is None
            else lambda model, tokenizer: while_loading(arranged_for_inference(model), tokenizer),
        )
    model = arranged_for_inference(model)
    for line in device_report():
        reporter.say(line)
    if needs_tokenizer is not None and tokenizer is None:
        raise UnsupportedError(
            f"{arguments.model}: has no tokenizer files, which {needs_tokenizer} needs"
        )
    if chat_flag is not None and tokenizer is not None and tokenizer.chat_template is None:
        raise InputError(f"{chat_flag}: {arguments.model} has no chat template; leave it out")
    return model, tokenizer
