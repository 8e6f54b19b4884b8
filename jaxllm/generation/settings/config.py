"""GenerationConfig: typed generation settings, named as in transformers.

Before it: the generation mode, which is the name of the strategy that the settings select, and
the conditions on it that fields need.
"""

from __future__ import annotations

from typing import Any, Literal

from jaxllm.generation.inputs.arguments import GENERATE_ARGUMENTS
from jaxllm.generation.inputs.values import (
    anything,
    biases,
    boolean,
    choice,
    constraint_list,
    converted_by,
    decay,
    integer,
    is_traced,
    layers,
    number,
    options,
    phrases,
    strings,
    token_biases,
    token_id_or_ids,
    token_ids,
    words,
)
from jaxllm.generation.settings.fields import Condition, Field, Settings, setting
from jaxllm.models.decoder import GenerativeModel

_WATERMARK = "jaxllm.contrib.watermark"
_OTHER_VOCABULARY = "for assistants of another vocabulary, which are not supported"


def generation_mode(
    config: GenerationConfig, assistant_model: GenerativeModel | None = None
) -> str:
    """Name of the strategy that the settings select, by transformers' rule.

    >>> generation_mode(GenerationConfig(num_beams=4))
    'beam_search'
    """
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained_beam_search"
    if config.num_beams > 1:
        if config.num_beam_groups > 1:
            return "group_beam_search"
        return "beam_sample" if config.do_sample else "beam_search"
    if not config.do_sample and is_contrastive(config):
        top_k = config.top_k
        if is_traced(top_k) or top_k > 1:
            return "contrastive_search"
    if draft_options(config, assistant_model):
        return "assisted_generation"
    if config.dola_layers is not None:
        return "dola_generation"
    return "sample" if config.do_sample else "greedy_search"


def is_contrastive(config: GenerationConfig) -> bool:
    """Returns whether `penalty_alpha` enables contrastive search (also if it is a tracer)."""
    alpha = config.penalty_alpha
    return is_traced(alpha) or bool(alpha)


def draft_options(config: GenerationConfig, assistant_model: GenerativeModel | None) -> list[str]:
    """Names of the options set that enable drafts."""
    options = {
        "assistant_early_exit": config.assistant_early_exit,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "assistant_model": assistant_model,
    }
    return [name for name, value in options.items() if value is not None]


SAMPLING_OR_CONTRASTIVE = Condition(
    "do_sample or penalty_alpha",
    lambda config, assistant: config.do_sample or is_contrastive(config),
    met_by_sampling=True,
)
CONTRASTIVE = Condition(
    "top_k > 1 and greedy search",
    lambda config, assistant: generation_mode(config) == "contrastive_search",
)
CONTRASTIVE_OR_BEAMS = Condition(  # beams raise: no warning comes before
    "penalty_alpha",
    lambda config, assistant: (
        generation_mode(config) == "contrastive_search" or config.num_beams > 1
    ),
)
GREEDY_OR_SAMPLING = Condition(
    "greedy search or sampling",
    lambda config, assistant: generation_mode(config) in ("dola_generation", "assisted_generation"),
)
ASSISTANT = Condition(
    "an assistant",
    lambda config, assistant: assistant is not None or config.assistant_early_exit is not None,
)
DRAFT = Condition("a draft", lambda config, assistant: bool(draft_options(config, assistant)))
OTHER_VOCABULARY = Condition("assistant_tokenizer", lambda config, assistant: False)


class GenerationConfig(Settings):
    """Generation settings: immutable, validated, compared and hashed by value.

    The class body is the only table of fields (:data:`FIELDS` by name). Names and defaults are
    those of transformers: all fields of 4.47 and those added in 5.x; `presence_penalty`,
    `frequency_penalty` and `logit_bias` are those of OpenAI's API. An unset field has its
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
    max_length: int = setting(default=20, converter=integer(1),
        doc="maximum length of a sequence, prompt included; max_new_tokens overrides it")
    max_new_tokens: int | None = setting(default=None, converter=integer(1),
        doc="maximum number of new tokens; if no length is set, 256 in commands and batches, and "
        "20 in generate()")
    min_length: int = setting(default=0, converter=integer(0),
        doc="minimum length of a sequence, prompt included: no end token comes before", neutral=0)
    min_new_tokens: int | None = setting(default=None, converter=integer(0),
        doc="minimum number of new tokens; overrides min_length", neutral=0)
    early_stopping: Literal[True, False, "never"] = setting(default=False,
        converter=choice(True, False, "never"),
        doc='True stops beam search once num_beams beams ended, "never" once none can improve',
        needs="num_beams")
    max_time: float | None = setting(default=None, converter=number("(0, inf)"),
        doc="time limit in seconds, checked after each token", slots=False)
    stop_strings: tuple[str, ...] | None = setting(default=None, converter=strings,
        doc="texts that end a sequence when one of them occurs")

    # Strategy
    do_sample: bool = setting(default=False, converter=boolean,
        doc="samples each token instead of taking the most probable one")
    num_beams: int = setting(default=1, converter=integer(1),
        doc="number of beams; above 1, beam search", static=True)
    num_beam_groups: int = setting(default=1, converter=integer(1),
        doc="number of beam groups; above 1, diverse beam search", static=True)
    diversity_penalty: float = setting(default=0.0, converter=number("[0, 1e30]"),
        doc="penalty on tokens that earlier beam groups chose", neutral=0.0,
        needs="num_beam_groups")
    penalty_alpha: float | None = setting(default=None, converter=number("[0, 1]"),
        doc="contrastive search: weight of the penalty on repetition", neutral=0.0,
        needs=CONTRASTIVE)
    dola_layers: Literal["low", "high"] | tuple[int, ...] | None = setting(default=None,
        converter=layers, doc='DoLa: layers to contrast with the last one: "low", "high" or a list',
        needs=GREEDY_OR_SAMPLING, slots=False)
    constraints: tuple[Any, ...] | None = setting(default=None, converter=constraint_list,
        doc="constrained beam search: a list of constraint objects", slots=False,
        library_only=True)
    force_words_ids: tuple[Any, ...] | None = setting(default=None, converter=phrases,
        doc="phrases, as lists of token ids, that beam search must produce", slots=False,
        token_ids=True)
    num_return_sequences: int = setting(default=1, converter=integer(1),
        doc="number of results for each prompt", static=True)
    use_mtp: bool | None = setting(default=None, converter=boolean,
        doc="drafts by multi-token prediction", execution=True, supported=(None, False))

    # Cache and execution
    use_cache: bool = setting(default=True, converter=boolean,
        doc="uses the KV cache; jaxllm always does", execution=True, supported=(True,))
    cache_implementation: str | None = setting(default=None, converter=anything,
        doc='kind of KV cache; "dynamic" has a fixed size too', execution=True,
        supported=(None, "static", "dynamic", "quantized", "sliding_window"))
    cache_config: dict[str, Any] | None = setting(default=None, converter=options,
        doc='options of the KV cache: {"nbits": 8} or {"sliding_window": W}', static=True,
        slots=False)
    max_cache_len: int | None = setting(default=None, converter=integer(1),
        doc="minimum number of tokens that the KV cache has room for", static=True, slots=False)
    return_legacy_cache: bool | None = setting(default=None, converter=boolean,
        doc="returns the cache as tuples", execution=True, supported=(None, False))
    low_memory: bool | None = setting(default=None, converter=boolean,
        doc="contrastive search: evaluates candidates one by one, to need less memory",
        neutral=False, needs=CONTRASTIVE_OR_BEAMS)
    prefill_chunk_size: int | None = setting(default=None, converter=integer(1),
        doc="number of prompt tokens that are processed at once, to need less memory",
        execution=True, static=True, slots=False)
    compile_config: Any = setting(default=None, converter=anything, doc="options of torch.compile",
        execution=True, supported=(None,))
    disable_compile: bool = setting(default=False, converter=boolean,
        doc="runs without compilation; jaxllm always compiles", execution=True, supported=(False,))
    continuous_batching_config: Any = setting(default=None, converter=anything,
        doc="options of transformers' continuous batching", execution=True, supported=(None,))

    # Logits processors
    temperature: float = setting(default=1.0, converter=number("[1e-30, 1e30]"),
        doc="divides the logits; below 1, probable tokens become more probable", neutral=1.0,
        needs="do_sample")
    top_k: int = setting(default=50, converter=integer(0),
        doc="considers only the k most probable tokens; 0 is off", neutral=0,
        needs=SAMPLING_OR_CONTRASTIVE)
    top_p: float = setting(default=1.0, converter=number("[0, 1]"),
        doc="considers only the most probable tokens up to this total probability; 1 is off",
        neutral=1.0, needs="do_sample")
    min_p: float | None = setting(default=None, converter=number("[0, 1]"),
        doc="drops tokens with less than min_p times the probability of the most probable token",
        needs="do_sample", neutral=0.0)
    top_h: float | None = setting(default=None, converter=number("(0, 1]"),
        doc="considers only the most probable tokens up to this share of the entropy",
        needs="do_sample")
    typical_p: float = setting(default=1.0, converter=number("(0, 1]"),
        doc="like top_p, but begins with the tokens of the most average log-probability; 1 is off",
        neutral=1.0, needs="do_sample")
    epsilon_cutoff: float = setting(default=0.0, converter=number("[0, 1)"),
        doc="drops tokens of a probability below this; 0 is off", neutral=0.0, needs="do_sample")
    eta_cutoff: float = setting(default=0.0, converter=number("[0, 1)"),
        doc="like epsilon_cutoff, but drops less where many tokens are probable; 0 is off",
        neutral=0.0, needs="do_sample")
    repetition_penalty: float = setting(default=1.0, converter=number("[1e-30, 1e30]"),
        doc="above 1, makes tokens of the text so far less probable; 1 is off", neutral=1.0)
    encoder_repetition_penalty: float = setting(default=1.0, converter=number("[1e-30, 1e30]"),
        doc="above 1, makes tokens of the encoder's input more probable; 1 is off", neutral=1.0,
        slots=False)
    presence_penalty: float = setting(default=0.0, converter=number("[-2, 2]"),
        doc="subtracted from the scores of generated tokens; 0 is off", neutral=0.0)
    frequency_penalty: float = setting(default=0.0, converter=number("[-2, 2]"),
        doc="subtracted from a token's score for each time it was generated; 0 is off", neutral=0.0)
    length_penalty: float = setting(default=1.0, converter=number("[-1e30, 1e30]"),
        doc="divides beam scores by length ** length_penalty; higher favors long beams",
        neutral=1.0, needs="num_beams")
    no_repeat_ngram_size: int = setting(default=0, converter=integer(0),
        doc="no sequence of this many tokens may occur twice; 0 is off", neutral=0)
    encoder_no_repeat_ngram_size: int = setting(default=0, converter=integer(0),
        doc="no sequence of this many tokens of the encoder's input may occur; 0 is off", neutral=0,
        slots=False)
    bad_words_ids: tuple[tuple[int, ...], ...] | None = setting(default=None, converter=words,
        doc="sequences of token ids that must not occur", token_ids=True)
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | None = setting(default=None,
        converter=biases,
        doc="pairs of token ids and a bias, which is added to the score of their last token",
        token_ids=True)
    logit_bias: tuple[tuple[int, float], ...] = setting(default=(), converter=token_biases,
        doc='numbers to add to the scores of tokens: {"TOKEN_ID": NUMBER, ...}', neutral=(),
        token_ids=True)
    renormalize_logits: bool = setting(default=False, converter=boolean,
        doc="normalizes the final scores, so that they are log-probabilities", neutral=False)
    forced_bos_token_id: int | None = setting(default=None, converter=integer(0),
        doc="first new token after a prompt of one token", static=True, token_ids=True)
    forced_eos_token_id: int | tuple[int, ...] | None = setting(default=None,
        converter=token_id_or_ids, doc="last token of a sequence that reaches max_length",
        static=True, token_ids=True)
    forced_decoder_ids: Any = setting(default=None, converter=anything,
        doc="pairs (position, token); removed in transformers 4.47", supported=(None,))
    remove_invalid_values: bool = setting(default=False, converter=boolean,
        doc="replaces NaN and infinite logits, which are errors otherwise", neutral=False)
    exponential_decay_length_penalty: tuple[int, float] | None = setting(default=None,
        converter=decay,
        doc="[start, factor]: raises the scores of end tokens after `start` new tokens")
    suppress_tokens: tuple[int, ...] | None = setting(default=None, converter=token_ids,
        doc="token ids that must not occur", token_ids=True)
    begin_suppress_tokens: tuple[int, ...] | None = setting(default=None, converter=token_ids,
        doc="token ids that must not be the first new token", token_ids=True)
    token_healing: bool = setting(default=False, converter=boolean,
        doc="generates the prompt's last token again, in case it was cut off", neutral=False,
        slots=False, provider="jaxllm.contrib.token_healing")
    guidance_scale: float | None = setting(default=None, converter=number("[-1e30, 1e30]"),
        doc="classifier-free guidance: weight of the prompt against negative prompts; 1 is off",
        slots=False)
    watermarking_config: Any = setting(default=None,
        converter=converted_by(_WATERMARK, "watermarking_config"),
        doc="options of a watermark: green lists or SynthID", slots=False, provider=_WATERMARK)

    # Outputs
    output_attentions: bool = setting(default=False, converter=boolean,
        doc="returns the attentions of each step", neutral=False, record=True)
    output_hidden_states: bool = setting(default=False, converter=boolean,
        doc="returns the hidden states of each step", neutral=False, record=True)
    output_scores: bool = setting(default=False, converter=boolean,
        doc="returns the processed scores of each step", neutral=False, record=True)
    output_logits: bool | None = setting(default=None, converter=boolean,
        doc="returns the raw logits of each step", record=True)
    return_dict_in_generate: bool = setting(default=False, converter=boolean,
        doc="no effect; generate() always returns an object with fields", library_only=True)

    # Special tokens
    pad_token_id: int | None = setting(default=None, converter=integer(0),
        doc="token after a sequence's end; if unset, the first end token", static=True)
    bos_token_id: int | None = setting(default=None, converter=integer(0),
        doc="token that an empty prompt starts with", static=True)
    eos_token_id: int | tuple[int, ...] | None = setting(default=None, converter=token_id_or_ids,
        doc="token that ends a sequence, or a list of them; None in a call switches them off",
        static=True, token_ids=True)
    decoder_start_token_id: int | tuple[int, ...] | None = setting(default=None,
        converter=token_id_or_ids, doc="token that the decoder starts with; if unset, bos_token_id",
        static=True)

    # Assisted generation
    is_assistant: Any = setting(default=None, converter=anything,
        doc="written by transformers; no effect", metadata=True)
    num_assistant_tokens: int = setting(default=20, converter=integer(1),
        doc="number of tokens in a draft", needs=ASSISTANT, static=True)
    num_assistant_tokens_schedule: str = setting(default="constant",
        converter=choice("constant", "heuristic", "heuristic_transient"),
        doc="heuristic: drafts grow by 2 tokens if accepted whole, or else shrink by 1",
        needs=ASSISTANT)
    assistant_confidence_threshold: float = setting(default=0.4, converter=number("[0, 1]"),
        doc="ends a draft at a token of lower probability", neutral=0.0, needs=ASSISTANT)
    assistant_lookbehind: int = setting(default=10, converter=integer(0), doc=_OTHER_VOCABULARY,
        needs=OTHER_VOCABULARY, library_only=True)
    target_lookbehind: int = setting(default=10, converter=integer(0), doc=_OTHER_VOCABULARY,
        needs=OTHER_VOCABULARY, library_only=True)
    max_matching_ngram_size: int | None = setting(default=None, converter=integer(1),
        doc="prompt lookup: maximum number of tokens to match; if unset, 2",
        needs="prompt_lookup_num_tokens")
    prompt_lookup_num_tokens: int | None = setting(default=None, converter=integer(1),
        doc="prompt lookup: number of tokens of a draft, copied from earlier text", static=True,
        slots=False)
    assistant_early_exit: int | None = setting(default=None, converter=integer(1),
        doc="number of the model's first layers that write the drafts", static=True, slots=False)
    assistant_ensemble_weight: float | None = setting(default=None, converter=number("(0, 1)"),
        doc="w: checks drafts with w * model + (1 - w) * draft, which changes results", needs=DRAFT,
        slots=False)
    speculation_type: Any = setting(default=None, converter=anything,
        doc="kind of assisted generation", execution=True, supported=(None,))

    # Written by transformers; no effect here
    generation_kwargs: Any = setting(default=None, converter=anything,
        doc="written by old versions of transformers", supported=(None, {}))
    transformers_version: Any = setting(default=None, converter=anything,
        doc="written by transformers; no effect", metadata=True)
    _from_model_config: Any = setting(default=None, converter=anything,
        doc="written by transformers; no effect", metadata=True)
    _commit_hash: Any = setting(default=None, converter=anything,
        doc="written by transformers; no effect", metadata=True)
    # fmt: on


FIELDS: dict[str, Field] = GenerationConfig.fields
"""Declarations of all fields of :class:`GenerationConfig`, by name."""


def declare_field(name: str, field: Field) -> None:
    """Adds a field to :class:`GenerationConfig`; type checkers do not see it.

    Declaring an added field again replaces it.

    Raises:
        ValueError: a built-in field or an argument of generate() has this name, or the field needs
            one that does not exist.
    """
    if name in _BUILT_IN or name in GENERATE_ARGUMENTS or hasattr(Settings, name):
        raise ValueError(f"declare_field: {name!r} is taken; choose another name")
    if isinstance(field.needs, str) and field.needs not in FIELDS:
        raise ValueError(
            f"declare_field({name!r}): unknown field {field.needs!r} in needs=; declare "
            f"{field.needs!r} first, or give needs=Condition(text, holds)"
        )
    field.name = name
    setattr(GenerationConfig, name, field)
    FIELDS[name] = field


_BUILT_IN = frozenset(FIELDS)
