"""T5's config.json, as written by transformers 4 and 5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.nn.mlp import activation

# `n_positions`, in the first files, is the length of pretraining, not a limit.
# `scalable_attention` of umT5 never had an effect.
HANDLED = frozenset({"n_positions", "scalable_attention"})
# Defaults of missing keys per model_type, where they differ from the class's.
ABSENT = {
    "mt5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"feed_forward_proj": "gated-gelu"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(cfg.ModelConfig):
    """T5 config, with the field names of config.json.

    `is_gated_act` and `dense_act_fn` follow from `feed_forward_proj` unless they are set.
    Two fields need care. `tie_word_embeddings` is corrected by the loader: a checkpoint with an
    `lm_head.weight` that differs from the embedding is not tied, one without is.
    `scale_decoder_outputs` (the head's input times d_model**-0.5) is the file's value if it has
    one. Otherwise it is true unless `tie_word_embeddings` is false: transformers 4 has only that
    field, transformers 5 writes both, with different meanings. As version 5 always writes
    ``"tie_word_embeddings": true`` for mT5 and umT5, it is None there: scaled if tied.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    is_encoder_decoder: ClassVar[bool] = True

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    bias_per_layer: bool = False
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    is_gated_act: bool | None = None
    dense_act_fn: str | None = None
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = True
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int | None = None

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def scaled(self) -> bool:
        """True if the input of the LM head is scaled."""
        scale = self.scale_decoder_outputs
        return self.tie_word_embeddings if scale is None else scale

    @property
    def gated(self) -> bool:
        gated = self.is_gated_act
        return self.feed_forward_proj.startswith("gated-") if gated is None else gated

    @property
    def act(self) -> str:
        """Name of the activation; `gated-gelu` has always meant the tanh GELU."""
        if self.dense_act_fn is not None:
            return self.dense_act_fn
        name = self.feed_forward_proj.removeprefix("gated-")
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else name

    @property
    def model_type(self) -> str:
        return "umt5" if self.bias_per_layer else "t5"

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {
            "num_decoder_layers": self.decoder_layers,
            "initializer_factor": 0.0,
            "feed_forward_proj": "relu",
            "is_gated_act": self.gated,
            "dense_act_fn": self.act,
            "scale_decoder_outputs": self.scaled,
        }

    @property
    def width(self) -> int:
        return self.d_model

    @property
    def head_counts(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        if self.bias_per_layer:
            model_type, architecture = "umt5", architecture.replace("T5", "UMT5", 1)
        raw = super().to_json(model_type, architecture)
        del raw["bias_per_layer"]
        for name in ("is_gated_act", "dense_act_fn"):
            if raw[name] is None:  # transformers takes null for a value
                del raw[name]
        raw["scale_decoder_outputs"] = self.scaled
        raw["is_encoder_decoder"] = "Encoder" not in architecture
        return raw

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> T5Config:
        """Reads and checks a config.json object.

        Raises ConfigError or UnsupportedError, naming the field.
        """
        model_type = raw.get("model_type")
        raw = {**ABSENT.get(str(model_type), {}), **raw}
        config = cfg.read_config(cls, raw, handled=HANDLED, derived=frozenset({"bias_per_layer"}))
        if raw.get("scale_decoder_outputs") is None:
            untied = raw.get("tie_word_embeddings") is False
            unclear = model_type in ("mt5", "umt5")
            scale = False if untied else None if unclear else True
            config = dataclasses.replace(config, scale_decoder_outputs=scale)
        if model_type == "umt5":
            config = dataclasses.replace(config, bias_per_layer=True)
        if config.decoder_start_token_id is None:
            # The T5 papers' convention, and transformers' fallback in training.
            config = dataclasses.replace(config, decoder_start_token_id=config.pad_token_id)
        config.check()
        cfg.check_token_ids(config)
        return config

    def check(self) -> None:
        super().check()
        sizes = ("d_model", "d_kv", "d_ff", "num_heads")
        checks.check_size(self, *sizes)
        decoder = ("decoder_layers",) if self.decoder_layers != 0 else ()  # 0: an encoder alone
        checks.check_size(self, "num_layers", *decoder, limit=checks.MAX_LAYERS)
        checks.check_rate(self, "dropout_rate")
        checks.check_positive(self, "layer_norm_epsilon", "initializer_factor")
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        if not 4 <= buckets <= 2**16:
            raise ConfigError(
                f"relative_attention_num_buckets: expected 4 to 65536, found {quoted(buckets)}"
            )
        if not buckets // 2 < distance <= 2**20:
            raise ConfigError(
                f"relative_attention_max_distance: expected at most 2**20 and more than half of "
                f"relative_attention_num_buckets ({buckets // 2}), found {quoted(distance)}"
            )
        named = "feed_forward_proj" if self.dense_act_fn is None else "dense_act_fn"
        activation(self.act, where=named)
