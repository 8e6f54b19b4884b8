"""GenerationConfig: typed generation settings, named as in transformers."""

from __future__ import annotations

from typing import Any, Literal

from jaxllm.generation.inputs.arguments import GENERATE_ARGUMENTS
from jaxllm.generation.settings.field_checks import (
    anything,
    biases,
    boolean,
    choice,
    decay,
    integer,
    layers,
    number,
    options,
    strings,
    token_id_or_ids,
    token_ids,
    words,
)
from jaxllm.generation.settings.fields import UNSET, Field, Settings, setting, with_fields

_ASSISTANT = "an assistant"
_OTHER_VOCABULARY = "assistants of another vocabulary"


@with_fields
class GenerationConfig(Settings):
    """Generation settings: immutable, validated, compared and hashed by value.

    The class body is the only table of fields (:data:`FIELDS` by name). Names and defaults are
    those of transformers: all fields of 4.47 and those added in 5.x. An unset field has its
    default. Numbers that are not ``static`` may be JAX tracers, whose values are not checked.

    None in a call disables a field (``top_k=None``, ``eos_token_id=None``), or leaves it unset if
    the field cannot be disabled (``max_length=None``). In a file, null always means unset.

    >>> base = GenerationConfig.from_dict({"temperature": 0.6, "eos_token_id": 2})
    >>> config = base.merge(GenerationConfig(do_sample=True, top_p=0.9))
    >>> config.temperature, config.top_p, config.top_k, sorted(config.explicit)
    (0.6, 0.9, 50, ['do_sample', 'top_p'])
    """

    # fmt: off
    # Lengths and stopping
    max_length: int = setting(default=20, converter=integer(1), doc="total length, prompt included",
        off=UNSET)
    max_new_tokens: int | None = setting(default=None, converter=integer(1),
        doc="new tokens; wins over max_length")
    min_length: int = setting(default=0, converter=integer(0),
        doc="no end token before this total length", off=0)
    min_new_tokens: int | None = setting(default=None, converter=integer(0),
        doc="no end token before so many new ones", per_row=0)
    early_stopping: Literal[True, False, "never"] = setting(default=False,
        converter=choice(True, False, "never"), doc="when beam search stops", off=UNSET,
        needs="num_beams")
    max_time: float | None = setting(default=None, converter=number("(0, inf)"),
        doc="seconds, checked after each token", slots=False)
    stop_strings: tuple[str, ...] | None = setting(default=None, converter=strings,
        doc="strings that end a row; needs tokenizer=")

    # Strategy
    do_sample: bool = setting(default=False, converter=boolean,
        doc="sample instead of taking the best token", off=UNSET, static=True)
    num_beams: int = setting(default=1, converter=integer(1), doc="beam search above 1", off=UNSET,
        static=True)
    num_beam_groups: int = setting(default=1, converter=integer(1),
        doc="diverse beam search above 1", off=UNSET, static=True)
    diversity_penalty: float = setting(default=0.0, converter=number("[0, inf)"),
        doc="penalty on tokens that earlier beam groups chose", off=0.0, needs="num_beam_groups")
    penalty_alpha: float | None = setting(default=None, converter=number("[0, 1]"),
        doc="contrastive search", off=0.0, needs="top_k > 1 and greedy search")
    dola_layers: Literal["low", "high"] | tuple[int, ...] | None = setting(default=None,
        converter=layers, doc='DoLa: "low", "high" or a list', needs="greedy search or sampling",
        static=True, slots=False)
    constraints: Any = setting(default=None, converter=anything, doc="constrained beam search",
        slots=False)
    force_words_ids: Any = setting(default=None, converter=anything, doc="phrases that must occur",
        slots=False)
    num_return_sequences: int = setting(default=1, converter=integer(1), doc="results per prompt",
        off=UNSET, static=True)
    use_mtp: bool | None = setting(default=None, converter=boolean, doc="multi-token prediction",
        only=(None, False))

    # Cache and execution
    use_cache: bool = setting(default=True, converter=boolean, doc="the KV cache is always used",
        off=UNSET, only=(True,))
    cache_implementation: str | None = setting(default=None, converter=anything,
        doc='kind of KV cache; "dynamic" has a fixed size too',
        only=(None, "static", "dynamic", "quantized", "sliding_window"), slots=False)
    cache_config: dict[str, Any] | None = setting(default=None, converter=options,
        doc='of the KV cache: {"nbits": 8} or {"sliding_window": W}', static=True, slots=False)
    max_cache_len: int | None = setting(default=None, converter=integer(1),
        doc="least number of cache slots to allocate", static=True, slots=False)
    return_legacy_cache: bool | None = setting(default=None, converter=boolean, doc="tuple caches",
        only=(None, False))
    low_memory: bool | None = setting(default=None, converter=boolean,
        doc="decodes candidates one after the other", off=False, needs="penalty_alpha")
    prefill_chunk_size: int | None = setting(default=None, converter=integer(1),
        doc="prefill in chunks", only=(None,))
    compile_config: Any = setting(default=None, converter=anything, doc="options of torch.compile",
        only=(None,))
    disable_compile: bool = setting(default=False, converter=boolean,
        doc="generation is always compiled", off=UNSET, only=(False,))
    continuous_batching_config: Any = setting(default=None, converter=anything, doc="serving",
        only=(None,))

    # Logits processors
    temperature: float = setting(default=1.0, converter=number("[1e-30, 1e30]"),
        doc="divides the logits", off=1.0, needs="do_sample", per_row=1.0, always=True)
    top_k: int = setting(default=50, converter=integer(0), doc="keeps the k best tokens; 0 is off",
        off=0, needs="do_sample or penalty_alpha", per_row=0, always=True)
    top_p: float = setting(default=1.0, converter=number("[0, 1]"),
        doc="nucleus sampling; 1 is off", off=1.0, needs="do_sample", per_row=1.0, always=True)
    min_p: float | None = setting(default=None, converter=number("[0, 1]"),
        doc="least probability relative to the best token", needs="do_sample", per_row=0.0)
    top_h: float | None = setting(default=None, converter=number("(0, 1]"),
        doc="share of the entropy", needs="do_sample")
    typical_p: float = setting(default=1.0, converter=number("(0, 1]"),
        doc="locally typical sampling; 1 is off", off=1.0, needs="do_sample", per_row=1.0)
    epsilon_cutoff: float = setting(default=0.0, converter=number("[0, 1)"),
        doc="least probability", off=0.0, needs="do_sample", per_row=0.0)
    eta_cutoff: float = setting(default=0.0, converter=number("[0, 1)"),
        doc="least probability, lower where the entropy is high", off=0.0, needs="do_sample",
        per_row=0.0)
    repetition_penalty: float = setting(default=1.0, converter=number("(0, inf)"),
        doc="on tokens of the sequence so far; 1 is off", off=1.0, per_row=1.0)
    encoder_repetition_penalty: float = setting(default=1.0, converter=number("(0, inf)"),
        doc="favours tokens of the encoder's input", off=1.0, slots=False)
    length_penalty: float = setting(default=1.0, converter=number("(-inf, inf)"),
        doc="exponent of the length in beam scores", off=1.0, needs="num_beams")
    no_repeat_ngram_size: int = setting(default=0, converter=integer(0),
        doc="no n-gram twice; 0 is off", off=0, per_row=0)
    encoder_no_repeat_ngram_size: int = setting(default=0, converter=integer(0),
        doc="no n-gram of the encoder's input", off=0, slots=False)
    bad_words_ids: tuple[tuple[int, ...], ...] | None = setting(default=None, converter=words,
        doc="forbidden sequences", static=True)
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | None = setting(default=None,
        converter=biases, doc="bias on sequences", static=True)
    renormalize_logits: bool = setting(default=False, converter=boolean,
        doc="log-softmax after all processors", off=False)
    forced_bos_token_id: int | None = setting(default=None, converter=integer(0),
        doc="the token after a single one", static=True)
    forced_eos_token_id: int | tuple[int, ...] | None = setting(default=None,
        converter=token_id_or_ids, doc="the token at max_length", static=True)
    forced_decoder_ids: Any = setting(default=None, converter=anything,
        doc="removed in transformers 4.47", only=(None,))
    remove_invalid_values: bool = setting(default=False, converter=boolean,
        doc="replaces NaN and infinities", off=False)
    exponential_decay_length_penalty: tuple[int, float] | None = setting(default=None,
        converter=decay, doc="(start, factor) on end tokens")
    suppress_tokens: tuple[int, ...] | None = setting(default=None, converter=token_ids,
        doc="forbidden tokens", static=True)
    begin_suppress_tokens: tuple[int, ...] | None = setting(default=None, converter=token_ids,
        doc="forbidden as the first new token", static=True)
    token_healing: bool = setting(default=False, converter=boolean,
        doc="chooses the prompt's last token anew; needs tokenizer=", off=False, slots=False)
    guidance_scale: float | None = setting(default=None, converter=number("(-inf, inf)"),
        doc="classifier-free guidance; 1 is off", slots=False)
    watermarking_config: Any = setting(default=None, converter=anything,
        doc="green lists or SynthID", slots=False)

    # Outputs
    output_attentions: bool = setting(default=False, converter=boolean,
        doc="returns attentions of each step", off=False, slots=False)
    output_hidden_states: bool = setting(default=False, converter=boolean,
        doc="returns hidden states of each step", off=False, slots=False)
    output_scores: bool = setting(default=False, converter=boolean, doc="returns processed scores",
        off=False)
    output_logits: bool | None = setting(default=None, converter=boolean, doc="returns raw logits")
    return_dict_in_generate: bool = setting(default=False, converter=boolean,
        doc="there is one form of result", off=UNSET)

    # Special tokens
    pad_token_id: int | None = setting(default=None, converter=integer(0),
        doc="fills finished rows; the first end token if unset", static=True, unset=-1)
    bos_token_id: int | None = setting(default=None, converter=integer(0),
        doc="starts an empty prompt", static=True, unset=-1)
    eos_token_id: int | tuple[int, ...] | None = setting(default=None, converter=token_id_or_ids,
        doc="one end-of-sequence token or several; None in a call switches them off", static=True,
        unset=-1)
    decoder_start_token_id: int | tuple[int, ...] | None = setting(default=None,
        converter=token_id_or_ids, doc="starts the decoder; bos if unset", static=True)

    # Assisted generation
    is_assistant: Any = setting(default=None, converter=anything, doc="metadata", metadata=True)
    num_assistant_tokens: int = setting(default=20, converter=integer(1), doc="tokens of a draft",
        off=UNSET, needs=_ASSISTANT, static=True)
    num_assistant_tokens_schedule: str = setting(default="constant",
        converter=choice("constant", "heuristic", "heuristic_transient"),
        doc="heuristic: 2 more after a draft accepted whole, else 1 less", off=UNSET,
        needs=_ASSISTANT)
    assistant_confidence_threshold: float = setting(default=0.4, converter=number("[0, 1]"),
        doc="a draft ends with a less probable token", off=0.0, needs=_ASSISTANT)
    assistant_lookbehind: int = setting(default=10, converter=integer(0), doc=_OTHER_VOCABULARY,
        off=UNSET, needs="assistant_tokenizer")
    target_lookbehind: int = setting(default=10, converter=integer(0), doc=_OTHER_VOCABULARY,
        off=UNSET, needs="assistant_tokenizer")
    max_matching_ngram_size: int | None = setting(default=None, converter=integer(1),
        doc="longest n-gram to look up; 2 if unset", needs="prompt_lookup_num_tokens")
    prompt_lookup_num_tokens: int | None = setting(default=None, converter=integer(1),
        doc="length of drafts looked up in the sequence so far", static=True, slots=False)
    assistant_early_exit: int | None = setting(default=None, converter=integer(1),
        doc="drafts by so many of the model's layers", static=True, slots=False)
    assistant_ensemble_weight: float | None = setting(default=None, converter=number("(0, 1)"),
        doc="drafts are judged by w * model + (1 - w) * draft", needs="a draft", slots=False)
    speculation_type: Any = setting(default=None, converter=anything, doc="assisted generation",
        only=(None,))

    # Written by transformers; no effect here
    generation_kwargs: Any = setting(default=None, converter=anything, doc="of old versions",
        only=(None, {}))
    transformers_version: Any = setting(default=None, converter=anything, doc="metadata",
        metadata=True)
    _from_model_config: Any = setting(default=None, converter=anything, doc="metadata",
        metadata=True)
    _commit_hash: Any = setting(default=None, converter=anything, doc="metadata", metadata=True)
    # fmt: on


FIELDS: dict[str, Field] = GenerationConfig.fields
"""Declarations of all fields of :class:`GenerationConfig`, by name."""


def declare_field(name: str, field: Field) -> None:
    """Adds a field to :class:`GenerationConfig`; type checkers do not see it.

    Declaring an added field again replaces it.

    Raises:
        ValueError: A built-in field or an argument of generate() has this name.
    """
    if name in _BUILT_IN or name in GENERATE_ARGUMENTS or hasattr(Settings, name):
        raise ValueError(f"declare_field: {name!r} is taken; choose another name")
    field.name = name
    setattr(GenerationConfig, name, field)
    FIELDS[name] = field


_BUILT_IN = frozenset(FIELDS)
