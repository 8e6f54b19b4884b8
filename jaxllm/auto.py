"""transformers' Auto classes: the family's class, config or tokenizer of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar

from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.load import gguf_in, named_spec, open_checkpoint, read_config_file, read_spec
from jaxllm.common.arguments import (
    FROM_PRETRAINED,
    TOKENIZER_FROM_PRETRAINED,
    checked,
    drop_renamed,
)
from jaxllm.common.errors import InputError, MissingFileError, UnsupportedError
from jaxllm.loading import tokenizer_of
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.model import BaseModel
from jaxllm.models.pretrained import pretrained
from jaxllm.models.registry import FAMILIES, model_spec
from jaxllm.tokenizers import Tokenizer, load_tokenizer
from jaxllm.tokenizers.batch import checked_side


def read_config(config: ModelConfig | Mapping[str, Any] | str | PathLike[str]) -> Any:
    """A config as it is, or read from the object in a config.json or from a model's path."""
    if isinstance(config, Mapping):
        return model_spec(config).config
    if isinstance(config, str | PathLike):
        return AutoConfig.from_pretrained(config)
    return checked(config, (ModelConfig,), "config", "a model's config, a dict or a path")


def read_config_for(
    model_class: type, config: ModelConfig | Mapping[str, Any] | str | PathLike[str]
) -> Any:
    """Reads a config as `read_config` does, and checks that a class can be made of it.

    Raises:
        InputError: the config belongs to another family.
    """
    read = read_config(config)
    classes = classes_for(read)
    # A caller's own class, such as one with another backbone, is related to no class of a family.
    is_related = any(
        issubclass(model_class, each) or issubclass(each, model_class) for each in model_classes()
    )
    if classes and is_related and not any(issubclass(model_class, each) for each in classes):
        raise InputError(
            f"config: {model_class.__name__} cannot be made of a {type(read).__name__}, which is "
            f"for {', '.join(each.__name__ for each in classes)}"
        )
    return read


def classes_for(config: ModelConfig) -> list[type]:
    """Classes of the models that have such a config."""
    return [each for each, config_class in model_classes().items() if config_class is type(config)]


def model_classes() -> dict[type, type]:
    """The classes of all families' models, each with the class of its config."""
    return {
        each: family.config
        for family in FAMILIES.values()
        for each in family.classes.values()
        if isinstance(each, type)
    }


class _Auto:
    """Base of the Auto classes of models, which have no instances."""

    model_class: ClassVar[type]
    """Base class of the families' classes for this task."""

    def __init__(self) -> None:
        raise InputError(f"{type(self).__name__}: call from_pretrained() or from_config()")

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | PathLike[str], **options: Any) -> Any:
        """Loads a checkpoint as its family's class for this task.

        Args:
            path_or_hub_id: a Hugging Face folder, a .gguf file or a Hub id.
            options: the arguments of `jaxllm.load`, except `architecture`; `config` may be a whole
                config too.

        Raises:
            UnsupportedError: the family has no class for this task.
            JaxLLMError: other errors of the class's `from_pretrained`.
        """
        return pretrained(cls.model_class, path_or_hub_id, called=cls, **options)

    @classmethod
    def from_config(
        cls, config: ModelConfig | Mapping[str, Any] | str | PathLike[str], **options: Any
    ) -> Any:
        """Makes a model of the config's family with random weights.

        `config` may also be the object in a config.json, or the path or Hub id of a model.

        `options` are those of the class's `from_config`: `seed`, `dtype`, `param_dtype`, ...
        """
        read = read_config(config)
        classes: list[Any] = classes_for(read)
        for each in classes:
            if issubclass(each, cls.model_class):
                return each.from_config(read, **options)
        raise UnsupportedError(
            f"config: a {type(read).__name__} has no {cls.model_class.__name__}; it has "
            f"{', '.join(each.__name__ for each in classes) or 'no model'}"
        )


class AutoModel(_Auto):
    """Models without a head, for embeddings; of T5, mT5 and umT5 the encoder."""

    model_class = BaseModel


class AutoModelForCausalLM(_Auto):
    """Decoder-only language models: Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, GPT-2."""

    model_class = CausalLM


class AutoModelForSeq2SeqLM(_Auto):
    """Encoder-decoder language models: T5, mT5, umT5, T5Gemma, BART."""

    model_class = EncoderDecoderLM


class AutoModelForSequenceClassification(_Auto):
    """Classifiers of sequences: Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, GPT-2."""

    model_class = SequenceClassifier


class AutoConfig:
    """Configs of checkpoints."""

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | PathLike[str], *, revision: str | None = None, **fields: Any
    ) -> Any:
        """Reads a checkpoint's config, a frozen dataclass such as `LlamaConfig`.

        Weights are not read, or downloaded, but for those of a .gguf file.

        Args:
            path_or_hub_id: a Hugging Face folder, a .gguf file or a Hub id.
            revision: branch, tag or commit on the Hub.
            fields: fields of config.json to override.
        """
        fields = drop_renamed("AutoConfig.from_pretrained()", fields, FROM_PRETRAINED)
        path = resolve(path_or_hub_id, revision, weights=False)
        if path.is_dir() and gguf_in(path) is None:
            file = path / "config.json"
            return named_spec({**read_config_file(file), **fields}, file).config
        checkpoint = open_checkpoint(path)
        with checkpoint.weights:
            return read_spec(checkpoint, None, fields).config


_GGUF_OPTIONS = frozenset({"padding_side", "truncation_side"})


class AutoTokenizer:
    """Tokenizers of checkpoints."""

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | PathLike[str], *, revision: str | None = None, **options: Any
    ) -> Tokenizer:
        """Loads a checkpoint's tokenizer; no weights are read, or downloaded.

        Args:
            path_or_hub_id: a Hugging Face folder, a .gguf file or a Hub id.
            revision: branch, tag or commit on the Hub.
            options: fields that override those of tokenizer_config.json, also in the files that
                `save_pretrained` writes: see `jaxllm.tokenizers.load_tokenizer`. For a .gguf file
                only `padding_side` and `truncation_side`.

        Raises:
            MissingFileError: there are no tokenizer files.
            TokenizerError, UnsupportedError: as `jaxllm.tokenizers.load_tokenizer`.
        """
        options = drop_renamed(
            "AutoTokenizer.from_pretrained()", options, TOKENIZER_FROM_PRETRAINED
        )
        path = resolve(path_or_hub_id, revision, weights=False)
        tokenizer = load_tokenizer(path, **options) if path.is_dir() else None
        if tokenizer is None and (path.is_file() or list(path.glob("*.gguf"))):
            if other := sorted(options.keys() - _GGUF_OPTIONS):
                raise UnsupportedError(f"{path}: a .gguf file takes no {', '.join(other)}")
            checkpoint = open_checkpoint(path)
            with checkpoint.weights:
                tokenizer = tokenizer_of(checkpoint)
            for name, value in options.items():
                setattr(tokenizer, name, checked_side(value, InputError, name))
        if tokenizer is None:
            raise MissingFileError(f"{path}: no tokenizer files")
        return tokenizer


__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
]
