"""Abstract models: shapes, dtypes and shardings from config.json alone, without weights.

`read_shares` says what a traced program reads of its arguments: all of an array, the rows that it
gathers, or none. A decode step has the whole of T5 among its arguments, encoder and projections of
the cross-attention's keys, and of an embedding that is not the head as well it takes the rows of a
few tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.split import open_gguf
from jaxllm.checkpoint.hub import BUNDLED, smollm2
from jaxllm.checkpoint.load import float_dtype, gguf_in, named_spec, read_config_file
from jaxllm.checkpoint.weight_files import format_of, t5x_folders, t5x_in
from jaxllm.common.arguments import checked, checked_path, checks_flags, is_integer
from jaxllm.common.errors import InputError, MissingFileError, UnsupportedError, quoted
from jaxllm.common.hardware import default_device
from jaxllm.models.build_options import Options
from jaxllm.models.lora import LoraConfig, add_lora
from jaxllm.models.model import Card, model_shapes
from jaxllm.models.quantize import layer_formats, quantized_shapes
from jaxllm.parallel.placement import mesh_of, put_shapes
from jaxllm.parallel.sharding import check_heads, check_mesh

PARTS = ("gather", "dynamic_slice", "slice")
"""Operations that read as many elements of their first operand as they return."""
VIEWS = (
    "convert_element_type",
    "copy",
    "expand_dims",
    "optimization_barrier",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
)
"""Operations whose results are read in place of their operands."""


@checks_flags
def abstract_model(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    device: Any = None,
    dtype: Any = "bfloat16",
    param_dtype: Any = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
    quantize: str | None = None,
    quantize_embeddings: bool = True,
) -> Any:
    """A model of `jax.ShapeDtypeStruct` parameters: no weights are read or allocated.

    `jaxllm.planning.lower` compiles the library's programs for it.

    Args:
        source: a folder with config.json or a .gguf file, the path of a config.json or of a .gguf
            file (only its header is read), or the object in a config.json.
        mesh: a mesh of `jaxllm.make_mesh` that the parameters are sharded over, also of devices
            that this machine does not have.
        device: the device that holds all parameters, in place of a mesh. None: the first of JAX.
        dtype: dtype of the computation: float32, bfloat16 or float16.
        param_dtype: dtype of the weights. None: that of the computation.
        attn_implementation, remat, scan_layers, quantize, quantize_embeddings: as `jaxllm.load`.

    Raises:
        MissingFileError: there is no config.json.
        ConfigError, UnsupportedError: as `jaxllm.load`, with the file and the field.
        InputError: the mesh does not divide the model's heads, or mesh or device is something else.
    """
    checked(attn_implementation, (str,), "attn_implementation", "a name")
    checked(quantize, (str, type(None)), "quantize", "a name or None")
    if mesh is not None:
        check_mesh(mesh)
    if device is not None and not hasattr(device, "platform"):
        raise InputError(f"device: expected a device of JAX, found {quoted(device)}")
    raw, where = read_source(source)
    spec = named_spec(raw, where)
    dtype = float_dtype("dtype", dtype)
    if dtype is None:  # which would be JAX's own default
        raise UnsupportedError("dtype: expected float32, bfloat16 or float16, found None")
    device = default_device() if device is None else device
    options = Options.on(
        (device if mesh is None else mesh.devices.flat[0]).platform,
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else float_dtype("param_dtype", param_dtype),
        attn_implementation=attn_implementation,
        remat=remat,
        scan_layers=scan_layers,
    )
    model = model_shapes(spec.make, spec.config, options)
    if quantize is not None:
        model = quantized_shapes(
            model, layer_formats(model, quantize, embeddings=quantize_embeddings)
        )
    if mesh is not None:
        check_heads(spec.config.head_counts, mesh)
    return put_shapes(model, mesh, device).with_card(Card(spec.config))


def with_lora(model: Any, rank: int) -> Any:
    """A float model of shapes with LoRA updates of all its linear layers, on the same devices.

    Raises:
        InputError: the rank is not an integer from 1 on.
    """
    if not is_integer(rank) or rank < 1:
        raise InputError(f"lora_rank: expected an integer from 1 on, found {quoted(rank)}")
    config, card = LoraConfig(rank=rank), model.checked_card("lora_rank")
    adapted = jax.eval_shape(lambda model: add_lora(model.with_card(card), config), model)
    mesh, leaf = mesh_of(model), jax.tree.leaves(model)[0]
    if leaf.sharding is not None:
        adapted = put_shapes(adapted, mesh, next(iter(leaf.sharding.device_set)))
    return adapted.with_card(card, modules_to_save=())


def read_source(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The object in a config.json, and its path for errors."""
    if isinstance(source, Mapping):
        return source, "config"
    path = smollm2() if source == BUNDLED else checked_path(source, "source")
    path = gguf_in(path) or path
    if path.suffix.lower() == ".gguf":
        with open_gguf(path) as file:
            return HFView(file).config, str(path)
    if os.path.isfile(path) and format_of(path) is not None:
        path = path.parent  # of a weight file, with config.json beside it
    if (found := t5x_in(path)) is not None:
        _, path = t5x_folders(found)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.lexists(path):  # False for a name that is too long
        raise MissingFileError(
            f"{path}: no such file; give a folder with config.json, or the path of one"
        )
    return read_config_file(path), str(path)


def device_bytes(tree: Any) -> int:
    """Bytes per device of a pytree of shapes; a sharded array counts as its shard, and two int4 as
    a byte."""

    def one(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        half = 2 if x.dtype in (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4)) else 1
        return math.prod(shape) * (8 if is_key else np.dtype(x.dtype).itemsize) // half

    return sum(map(one, jax.tree.leaves(tree)))


def is_used(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """True if an operation of the program has the variable among its operands.

    Others are no arguments of the compiled program.
    """
    return any(variable is operand for eqn in jaxpr.eqns for operand in eqn.invars)


def read_shares(jaxpr: core.Jaxpr, variables: Sequence[Any]) -> list[float]:
    """Shares of the arrays' elements, 0 to 1, that one run of a program reads.

    Loops count as one iteration, since the step of a decode loop is one, and of a conditional's
    branches counts the one that reads most.

    >>> import jax, jax.numpy as jnp
    >>> def step(table, matrix, other, ids):
    ...     return jax.jit(lambda table, other, x: table[ids] @ x)(table, other, matrix)
    >>> arrays = jnp.ones((100, 4)), jnp.ones((4, 8)), jnp.ones((4, 8)), jnp.array([3, 5])
    >>> jaxpr = jax.make_jaxpr(step)(*arrays).jaxpr
    >>> read_shares(jaxpr, jaxpr.invars[:3])
    [0.02, 1.0, 0.0]
    """
    shares = dict.fromkeys(variables, 0.0)
    # Of a result that is a view: the variable that it shows. None: the array itself.
    shown = {variable: variable for variable in variables}
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(x, core.Literal) else shown.get(x) for x in eqn.invars]
        if not any(operand is not None for operand in operands):
            continue
        if eqn.primitive.name in VIEWS:
            outputs = zip(eqn.outvars, operands, strict=True)
            shown |= {out: x for out, x in outputs if x is not None}
            continue
        for operand, share in zip(operands, operand_shares(eqn), strict=True):
            if operand is not None:
                shares[operand] = min(1.0, shares[operand] + share)
    return [shares[variable] for variable in variables]


def with_experts(shares: Iterable[float], used: Iterable[float]) -> list[float]:
    """The shares of parameters that a program reads, of which experts are read where they are used.

    Args:
        used: share that the program's tokens use (`jaxllm.models.expert_use`).
    """
    return [part if share and part < 1 else share for share, part in zip(shares, used, strict=True)]


def operand_shares(eqn: core.JaxprEqn) -> list[float]:
    """Share of each operand that an operation reads."""
    count, parameters = len(eqn.invars), eqn.params
    if eqn.primitive.name in PARTS:
        result: Any = eqn.outvars[0].aval
        operand: Any = eqn.invars[0].aval
        return [min(1.0, result.size / max(operand.size, 1))] + [1.0] * (count - 1)
    if eqn.primitive.name == "while":
        first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
        condition = _all_shares(parameters["cond_jaxpr"])
        body = _all_shares(parameters["body_jaxpr"])
        # Both may read the same elements of what the loop carries.
        carried = (min(1.0, a + b) for a, b in zip(condition[first:], body[second:], strict=True))
        return [*condition[:first], *body[:second], *carried]
    if eqn.primitive.name == "cond":
        branches = [_all_shares(branch) for branch in parameters["branches"]]
        return [1.0, *(max(shares) for shares in zip(*branches, strict=True))]
    inner = [x for x in parameters.values() if isinstance(_open(x), core.Jaxpr)]
    if len(inner) == 1 and len(_open(inner[0]).invars) == count:
        return _all_shares(inner[0])
    return [1.0] * count


def _all_shares(jaxpr: Any) -> list[float]:
    return read_shares(_open(jaxpr), _open(jaxpr).invars)


def _open(jaxpr: Any) -> Any:
    """The jaxpr of a closed one. JAX 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)
