"""Weight table of T5: our parameters and Hugging Face's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxllm.models.weights import Entry, Table, linear, norm, same


def _stack_entries(path: str, tensor: str, *, decoder: bool) -> tuple[Entry, ...]:
    layer, tensor_layer = f"{path}.blocks.{{i}}", f"{tensor}.block.{{i}}.layer"
    attn, ff = f"{tensor_layer}.0.SelfAttention", 2 if decoder else 1
    dense = f"{tensor_layer}.{ff}.DenseReluDense"
    cross = (
        *norm(f"{layer}.cross_norm", f"{tensor_layer}.1.layer_norm"),
        *(
            e
            for x in "qkvo"
            for e in _plain(f"{layer}.cross.{x}", f"{tensor_layer}.1.EncDecAttention.{x}")
        ),
    )
    return (
        *same(f"{path}.position_bias.{{i}}.table.weight", f"{attn}.relative_attention_bias.weight"),
        *norm(f"{layer}.attn_norm", f"{tensor_layer}.0.layer_norm"),
        *(e for x in "qkvo" for e in _plain(f"{layer}.attn.{x}", f"{attn}.{x}")),
        *(cross if decoder else ()),
        *norm(f"{layer}.mlp_norm", f"{tensor_layer}.{ff}.layer_norm"),
        *_plain(f"{layer}.mlp.gate", f"{dense}.wi_0"),
        *_plain(f"{layer}.mlp.up", f"{dense}.wi_1"),
        *_plain(f"{layer}.mlp.down", f"{dense}.wo"),
        *norm(f"{path}.norm", f"{tensor}.final_layer_norm"),
    )


def _plain(path: str, tensor: str) -> Iterator[Entry]:
    return linear(path, tensor, bias=False)


def t5_table(*, gated: bool) -> Table:
    """Weight table of T5. v1.0 has one input matrix `wi`; gated: `wi_0` (gate) and `wi_1`."""
    entries = (
        *same("shared.weight", "shared.weight"),
        *_stack_entries("encoder", "encoder", decoder=False),
        *_stack_entries("decoder", "decoder", decoder=True),
        *same("lm_head.weight", "lm_head.weight"),
    )
    if not gated:
        entries = tuple(
            dataclasses.replace(e, tensor=e.tensor.replace(".wi_1.", ".wi.")) for e in entries
        )
    return Table(
        entries,
        # Files of the first T5 models have a cross-attention bias that is never used.
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        copies=(
            (r"(encoder|decoder)\.embed_tokens\.weight", "shared.weight"),
            (r"lm_head\.weight", "shared.weight"),
        ),
    )
