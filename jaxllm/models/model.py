"""Base classes of models: weights as a pytree, a card with the rest of the files, an LM head."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Set
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.cache.attention_view import AttentionView, Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.arguments import CALL, checked, checked_count, checks_flags, drop_renamed
from jaxllm.common.errors import InputError, quoted
from jaxllm.models.config import ModelConfig, check_token_ids
from jaxllm.models.embedding import EmbeddingRecipe
from jaxllm.models.outputs import BaseOutput, DecodeOutput
from jaxllm.models.pretrained import Generates, Pretrained
from jaxllm.models.summary import summary
from jaxllm.models.weights import is_quantized, parameters, with_parameters
from jaxllm.nn.block import Stack, StackOutput, shallow_copy
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.platform.attention import LANES, SLOT_MULTIPLE
from jaxllm.parallel.sharding import constrain

C = TypeVar("C", bound=ModelConfig)
M = TypeVar("M", bound="Model[Any]")
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is needed to save the files of a checkpoint again as they were."""

    config: str
    """Text of config.json."""
    dtypes: tuple[tuple[str, str], ...]
    """(tensor name, dtype) of every tensor in the file."""
    copies: tuple[tuple[str, str], ...] = ()
    """(tensor name, our path) of tensors that are copies of another parameter."""
    constants: tuple[tuple[str, int], ...] = ()
    """(tensor name, rows) of tensors that follow from the config."""
    stripped: bool = False
    """True if tensor names lack the base model's prefix."""
    file: str = ""
    """Path of the checkpoint."""
    quantized: bool = False


@dataclasses.dataclass(frozen=True)
class Card:
    """What the files of a model say beside its weights; the forward pass needs none of it."""

    config: Any
    """`ModelConfig` of config.json, with special tokens and context length."""
    generation_config: Any = None
    """`GenerationConfig` of the checkpoint: defaults of `generate()`. None: there is none."""
    tokenizer_eos: tuple[int, ...] = ()
    """End token of the tokenizer, which config.json may lack; it also ends a sequence."""
    unknown_eos: tuple[int, ...] = ()
    """End tokens that the files name and that the vocabulary does not have."""
    origin: Origin | None = None
    """Files of the checkpoint that the model was loaded from, if any."""
    embedding: EmbeddingRecipe | None = None
    """What the files of sentence-transformers say. None: the folder has no modules.json."""
    modules_to_save: tuple[str, ...] | None = None
    """Paths of modules that are fully trained beside LoRA, and saved with the adapter. None: the
    card of a model without LoRA."""

    def __post_init__(self) -> None:
        checked(self.config, (ModelConfig,), "Card", "the config of a model")
        if self.generation_config is not None and not hasattr(self.generation_config, "to_dict"):
            raise InputError(
                "Card: generation_config: expected a GenerationConfig, found "
                f"{quoted(self.generation_config)}"
            )

    @property
    def pooling(self) -> str | None:
        """How the checkpoint makes the embedding of a text, such as "last": config.json's
        `pooling_type`, which GGUF files have. None: it does not say."""
        return None if self.origin is None else json.loads(self.origin.config).get("pooling_type")

    def lora_modules(self, purpose: str) -> tuple[str, ...]:
        """Paths of `modules_to_save`.

        Raises:
            InputError: the card is that of a model without LoRA. The message begins with `purpose`.
        """
        if self.modules_to_save is None:
            raise InputError(
                f"{purpose}: the card belongs to the model before LoRA was added, and does not say "
                "which modules are trained in full; use the card of the model with LoRA"
            )
        return self.modules_to_save


class Carded:
    """Mixin of modules with a card that is no part of their pytree.

    NNX flattens `vars(module)`, which does not hold slots, so the card does not influence the tree
    structure. Copies and pickles of a module keep the card. The result of a JAX transformation or
    of `nnx.merge` has none.
    """

    __slots__ = ("_card",)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_card": getattr(self, "_card", None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "_card", state["_card"])
        vars(self).update({name: x for name, x in state.items() if name != "_card"})

    def __deepcopy__(self, memo: Any = None) -> Self:
        copied: Any = super().__deepcopy__(memo)  # pyright: ignore[reportAttributeAccessIssue]
        object.__setattr__(copied, "_card", getattr(self, "_card", None))
        return copied


class Model(Pretrained, Carded, nnx.Module, Generic[C]):
    """Weights and the config of the forward pass as a pytree, with a card beside it.

    The tree structure depends on what the forward pass reads, and on nothing else. Models of one
    architecture share compiled programs and can be averaged with `jax.tree.map`. The card holds the
    rest of the files: whole config, special tokens, generation settings, origin. A model that comes
    out of a JAX transformation has no card; `with_card` gives it one.
    """

    is_encoder_decoder = False
    config_reads: ClassVar[tuple[str, ...]] = ()
    """Config fields that the forward pass of this class reads, although most classes do not read
    the fields; see `ModelConfig.forward_part`."""

    forward_config: C
    """The part of the config that the forward pass reads; the rest of its fields is None or 0."""

    def __init__(self, config: C):
        config.check()
        self.forward_config = config.forward_part(*self.config_reads)
        object.__setattr__(self, "_card", Card(config))

    @property
    def card(self) -> Card | None:
        """What the model's files say beside the weights. None after a JAX transformation."""
        return getattr(self, "_card", None)

    def with_card(self, card: Card | None = None, **fields: Any) -> Self:
        """A copy with this card, or with some fields of its own card changed; shares the weights.

        A model that a JAX transformation returned gets its card back with
        ``averaged.with_card(model.card)``.

        Raises:
            InputError: the card belongs to a model of another architecture, or its config is not
                valid or has only what the forward pass reads.
        """
        checked(card, (Card, type(None)), "card", "the card of a model")
        card = self.checked_card("with_card") if card is None else card
        card = dataclasses.replace(card, **fields) if fields else card
        if card.config.forward_part(*self.config_reads) != self.forward_config:
            raise InputError("with_card: the card belongs to a model of another architecture")
        if card.config == self.forward_config:
            raise InputError(
                "with_card: this config lacks what the forward pass does not read, such as special "
                "tokens; give the whole one, as the original model's card or AutoConfig has it"
            )
        card.config.check()
        copied = shallow_copy(self)
        object.__setattr__(copied, "_card", card)
        return copied

    def checked_card(self, purpose: str) -> Card:
        """Returns the card.

        Raises:
            InputError: the model has no card. The message begins with `purpose`.
        """
        if self.card is None:
            raise InputError(
                f"{purpose}: this {type(self).__name__} came out of a JAX transformation, which "
                "keeps the weights but not the card with config.json, special tokens, generation "
                "settings and origin; use model.with_card(original.card), for a new model with "
                "Card(config)"
            )
        return self.card

    @property
    def config(self) -> C:
        """The config. Without a card only what the forward pass reads (`forward_config`)."""
        return self.forward_config if self.card is None else self.card.config

    @config.setter
    def config(self, value: C) -> None:
        card = dataclasses.replace(self.checked_card("config"), config=value)
        object.__setattr__(self, "_card", card)
        object.__setattr__(self, "forward_config", value.forward_part(*self.config_reads))

    @property
    def generation_config(self) -> Any:
        """`GenerationConfig` of the checkpoint: defaults of `generate()`. None: there is none."""
        return self.checked_card("generation_config").generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        card = self.checked_card("generation_config")
        object.__setattr__(self, "_card", dataclasses.replace(card, generation_config=value))

    @property
    def embedding(self) -> Embedding:
        """Token embedding (of an encoder-decoder: shared by both)."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """Compute dtype, as of transformers' Flax classes."""
        return self.embedding.dtype

    def resize_token_embeddings(self, size: int) -> Self:
        """A copy with ``size`` token embeddings; new rows are the mean of the old ones.

        After ``tokenizer.add_tokens(...)``:
        ``model = model.resize_token_embeddings(len(tokenizer))``. transformers changes the model.
        A mean makes a new token as probable as the others on average (Hewitt 2021, "Initializing
        new word embeddings for pretrained language models"). The other parameters are shared.

        Raises:
            InputError: a special token of the config would have no row, or quantized weights.
        """
        checked(size, (int, np.integer), "size", "an integer")
        card = self.checked_card("resize_token_embeddings")
        if is_quantized(self):
            raise InputError(
                f"resize_token_embeddings({size}): the weights are quantized; load the model "
                "without quantize="
            )
        config = dataclasses.replace(card.config, vocab_size=size)
        try:
            config.check()
            check_token_ids(config)
        except ValueError as error:
            raise InputError(f"resize_token_embeddings({size}): {error}") from None
        resized = {
            name: _resized(x, card.config.vocab_size, size)
            for name, x in parameters(self).items()
            if name.split(".")[-2:-1] in (["embed"], ["shared"], ["lm_head"])
        }
        resized |= self.resized_constants(size)
        model: Any = with_parameters(self, resized)
        forward_config = config.forward_part(*self.config_reads)
        if hasattr(model, "backbone"):
            backbone = shallow_copy(model.backbone, config=config.forward_part())
            model = shallow_copy(model, backbone=backbone)
        model = shallow_copy(model, forward_config=forward_config)
        return model.with_card(card, config=config)

    @classmethod
    def call_options(cls) -> Set[str]:
        """Names of the arguments that `__call__` takes beside those that it declares."""
        return frozenset()

    def resized_constants(self, size: int) -> dict[str, jax.Array]:
        """Arrays over the vocabulary that are no matrices, for another number of tokens."""
        return {}

    def __repr__(self) -> str:
        return summary(self)

    __str__ = __repr__


def model_shapes(make: Callable[..., Any], config: ModelConfig, options: Any) -> Any:
    """A model of `jax.ShapeDtypeStruct` parameters, with the card of its config.

    Args:
        make: class of the model.
        options: `Options` of the model's layers.
    """
    shapes = jax.eval_shape(lambda: make(config, options, rngs=None))
    return shapes.with_card(Card(config))


def _resized(x: Shaped[Array, " V *rest"], old: int, size: int) -> Shaped[Array, " W *rest"]:
    """Rows of the tokens that stay, then rows of new tokens."""
    if size <= old:
        return x[:size]
    mean = jnp.mean(x.astype(jnp.float32), 0, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(mean, (size - old, *x.shape[1:]))])


class BaseModel(Model[C]):
    """Base of models without a head, whose call returns a `BaseOutput`."""


def has_arrays(tree: object) -> bool:
    """True if any leaf is an array or the shape of one."""
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    return any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(tree))


def model_call(call: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorates a model's `__call__`: checks names and flags, and allows for trees of labels.

    The names are those of its arguments and of `Model.call_options`.

    `optax.multi_transform` and `optax.masked` call a tree of labels or masks if it is callable. One
    with the structure of a model is, and returns itself then.
    """

    with_keywords = checks_flags(call)
    own_names = inspect.signature(call).parameters.keys()

    @functools.wraps(call)
    def wrapped(self: M, *args: P.args, **kwargs: P.kwargs) -> Any:
        if list(map(type, args)) == [type(self)] and not has_arrays(self):
            return self
        if not kwargs:
            return call(self, *args)  # pyright: ignore[reportCallIssue]
        own: Any = drop_renamed(type(self).__name__, kwargs, CALL)
        if (others := own.keys() - own_names) and (unknown := others - self.call_options()):
            names = sorted({*own_names, *self.call_options()} - {"self", "options", "arrays"})
            raise InputError(
                f"{min(unknown)}: no argument of a {type(self).__name__}, which has "
                f"{', '.join(names)}"
            )
        return with_keywords(self, *args, **own)  # pyright: ignore[reportCallIssue]

    return wrapped


class LanguageModel(Generates, Model[C]):
    """Base of models with an LM head. Implements `Decoder`; a subclass defines `embedding`,
    `decoder_stack` and `run_decoder`."""

    lm_head: Linear | None
    """None: tied embedding."""

    @property
    def decoder_stack(self) -> Stack:
        """Blocks of the decoder."""
        raise NotImplementedError

    def run_decoder(
        self,
        tokens: Int[Array, "B T"] | None,
        view: AttentionView,
        cache: Cache,
        **options: Any,
    ) -> StackOutput:
        """Runs the decoder on new columns.

        `options` are the options of `Stack.__call__` and other inputs of the family.
        """
        raise NotImplementedError

    @property
    def depth(self) -> int:
        return len(self.decoder_stack.blocks)

    @property
    def tied_embedding(self) -> bool:
        return self.lm_head is None

    @property
    def decoder_embedding(self) -> Embedding:
        """Token embedding of the decoder, which a tied head shares."""
        return self.embedding

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.decoder_embedding(tokens)

    @property
    def head(self) -> Head:
        """The LM head, with the tied embedding if it has no matrix of its own."""
        layer = self.decoder_embedding if self.lm_head is None else self.lm_head
        return Head(layer, softcap=self.config.logit_softcap)

    def scaled_for_head(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Hidden states as the LM head reads them."""
        return x

    def logits(self, x: Float[Array, "... D"], key: Array | None = None) -> Float[Array, "... V"]:
        """Float32 logits of hidden states."""
        return self.head(self.scaled_for_head(x), key)

    def head_inputs(
        self, *, dropout_key: Array | None = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], Array | None, Float[Array, ""] | None]:
        """One forward pass up to the LM head: its input, its dropout key, and the loss of routers
        (`load_balancing_loss`).

        ``model.head(x, key)`` are the logits of `__call__`.
        """
        raise NotImplementedError

    @property
    def cache_slot_tile(self) -> int:
        # A cache with an axis of heads has its slots in the lanes.
        return LANES if self.decoder_stack.cache_has_head_axis else 1

    @property
    def cache_slot_multiple(self) -> int:
        return SLOT_MULTIPLE if self.decoder_stack.blocks[0].attn.has_step_kernel else 1

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A self-attention cache of `capacity` columns, without tokens."""
        for name, size in (("batch", batch), ("capacity", capacity)):
            checked_count(size, name)
        stack = self.decoder_stack
        attn = stack.blocks[0].attn
        return Cache.empty(
            len(stack.blocks),
            batch,
            capacity,
            attn.kv_heads,
            attn.head_dim,
            attn.k.dtype,
            counts_tokens=stack.counts_tokens,
            head_axis=stack.cache_has_head_axis,
        )

    def decode(
        self,
        tokens: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        cache_is_empty: bool = False,
        logits_column: Int[Array, " B"] | None = None,
        branches: Branches | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **inputs: Any,
    ) -> DecodeOutput:
        """Runs new columns after the cached ones (`Decoder.decode`); `inputs` are the family's."""
        view, cache = cache.make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
        out = self.run_decoder(
            tokens,
            view,
            cache,
            cache_is_empty=cache_is_empty,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **inputs,
        )
        logits = self.logits(out.x if logits_column is None else take_column(out.x, logits_column))
        logits = constrain(logits, "rows", None, "vocab")
        return DecodeOutput(
            logits=logits,
            cache=cache.replace(layers=out.layers),
            last_hidden_state=out.x,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            cross_attentions=out.cross_attentions,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """LM head: float32 logits of hidden states, as a function.

    With a `softcap` c the logits x become ``c * tanh(x / c)`` (Gemma 2).
    """

    layer: Linear | Embedding
    """The head's own matrix, or the tied embedding."""
    bias: Float[Array, "#N V"] | None = None
    """Constant added to the logits (BART), which is not trained."""
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(self, x: Float[Array, "... D"], key: Array | None = None) -> Float[Array, "... V"]:
        """Logits. `key`: random key for the dropout of LoRA."""
        layer = self.layer
        logits = layer.attend(x) if isinstance(layer, Embedding) else layer(x, key)
        logits = logits.astype(jnp.float32)
        if self.bias is not None:
            bias = jax.lax.stop_gradient(self.bias).astype(jnp.float32)
            logits = logits + bias.reshape([1] * (logits.ndim - 1) + [-1])
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


def take_column(
    x: Shaped[Array, "B T *rest"], column: Int[Array, " B"]
) -> Shaped[Array, "B 1 *rest"]:
    """Takes x[b, column[b]] of each row b, as a sequence of length 1."""
    return jnp.take_along_axis(x, column.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)


def base_output(
    out: StackOutput, cache: Cache | None = None, *, output_router_logits: bool = False
) -> BaseOutput:
    """Converts the output of a stack to Hugging Face's names; adds the updated cache."""
    routers = out.router_logits if output_router_logits else ()
    return BaseOutput(
        last_hidden_state=out.x,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        cross_attentions=out.cross_attentions,
        cache=None if cache is None else cache.replace(layers=out.layers),
        router_logits=tuple(x.reshape(-1, x.shape[-1]) for x in routers) or None,
    )
