"""Every field of a generation config: its default, what it may hold, and what it does.

``FIELDS`` is the one table behind validation, the errors for options that are not implemented, the
warnings for options without effect, and the documentation. Names and defaults are those of
transformers: all fields of 4.47 and those that 5.x added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.generation.settings.field_checks import (
    Check,
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


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()
"""As ``Field.off``: None means that the field was not given."""


@dataclass(frozen=True)
class Field:
    """One field of a generation config.

    Attributes:
        default: The value while nobody has given one.
        check: Returns the value in its stored form (lists as tuples), or raises BadValueError.
        note: What the field does, for the documentation.
        off: What None means when it is given in a call: a neutral value, None itself, or UNSET.
        needs: The option without which the field has no effect (``check_consistent``).
        only: The values that are implemented; None means all.
    """

    default: Any
    check: Check
    note: str
    off: Any = None
    needs: str | None = None
    only: tuple[Any, ...] | None = None

    @property
    def neutral(self) -> Any:
        """The value that changes nothing."""
        return self.default if self.off is UNSET else self.off


_EOS = "one end-of-sequence token or several; None in a call switches them off"
_ASSISTED = "assisted generation"
_UNIVERSAL = "assistants of another vocabulary"

FIELDS: Mapping[str, Field] = {
    # Length
    "max_length": Field(20, integer(1), "total length, prompt included", UNSET),
    "max_new_tokens": Field(None, integer(1), "new tokens; wins over max_length"),
    "min_length": Field(0, integer(0), "no end token before this total length", 0),
    "min_new_tokens": Field(None, integer(0), "no end token before as many new ones"),
    "early_stopping": Field(
        False, choice(True, False, "never"), "when beam search stops", UNSET, needs="num_beams"
    ),
    "max_time": Field(None, number("(0, inf)"), "seconds, looked at after each token"),
    "stop_strings": Field(None, strings, "texts that end a row; needs tokenizer="),
    # Mode
    "do_sample": Field(False, boolean, "sample instead of taking the best token", UNSET),
    "num_beams": Field(1, integer(1), "beam search above 1", UNSET),
    "num_beam_groups": Field(1, integer(1), "diverse beam search above 1", UNSET),
    "diversity_penalty": Field(0.0, number("[0, inf)"), "between groups", 0.0, "num_beam_groups"),
    "penalty_alpha": Field(
        None, number("[0, 1]"), "contrastive search", 0.0, "top_k > 1 and greedy search"
    ),
    "dola_layers": Field(
        None, layers, 'DoLa: "low", "high" or a list', None, "greedy search or sampling"
    ),
    "constraints": Field(None, anything, "constrained beam search"),
    "force_words_ids": Field(None, anything, "phrases that must occur"),
    "num_return_sequences": Field(1, integer(1), "results per prompt", UNSET),
    "use_mtp": Field(None, boolean, "multi-token prediction", only=(None, False)),
    # Cache and execution
    "use_cache": Field(True, boolean, "the key-value cache is always used", UNSET, only=(True,)),
    "cache_implementation": Field(
        None,
        anything,
        "dynamic is static too",
        only=(None, "static", "dynamic", "quantized", "sliding_window"),
    ),
    "cache_config": Field(None, options, 'of a cache: {"nbits": 8} or {"sliding_window": W}'),
    "max_cache_len": Field(None, integer(1), "slots to allocate, or more"),
    "return_legacy_cache": Field(None, boolean, "tuple caches", only=(None, False)),
    "low_memory": Field(
        None, boolean, "candidates are read one after the other", False, "penalty_alpha"
    ),
    "prefill_chunk_size": Field(None, integer(1), "prefill in chunks", only=(None,)),
    "compile_config": Field(None, anything, "options of torch.compile", only=(None,)),
    "disable_compile": Field(False, boolean, "generation is always compiled", UNSET, only=(False,)),
    "continuous_batching_config": Field(None, anything, "serving", only=(None,)),
    # Scores
    "temperature": Field(1.0, number("[1e-30, 1e30]"), "divides the scores", 1.0, "do_sample"),
    "top_k": Field(50, integer(0), "keeps the k best; 0 is off", 0, "do_sample or penalty_alpha"),
    "top_p": Field(1.0, number("[0, 1]"), "nucleus; 1 is off", 1.0, "do_sample"),
    "min_p": Field(None, number("[0, 1]"), "relative to the best", needs="do_sample"),
    "top_h": Field(None, number("(0, 1]"), "share of the entropy", needs="do_sample"),
    "typical_p": Field(1.0, number("(0, 1]"), "locally typical; 1 is off", 1.0, "do_sample"),
    "epsilon_cutoff": Field(0.0, number("[0, 1)"), "least probability", 0.0, "do_sample"),
    "eta_cutoff": Field(0.0, number("[0, 1)"), "adaptive epsilon", 0.0, "do_sample"),
    "repetition_penalty": Field(1.0, number("(0, inf)"), "on used tokens; 1 is off", 1.0),
    "encoder_repetition_penalty": Field(1.0, number("(0, inf)"), "favours the input", 1.0),
    "length_penalty": Field(
        1.0, number("(-inf, inf)"), "exponent of the length in beam scores", 1.0, "num_beams"
    ),
    "no_repeat_ngram_size": Field(0, integer(0), "no n-gram twice; 0 is off", 0),
    "encoder_no_repeat_ngram_size": Field(0, integer(0), "no n-gram of the input", 0),
    "bad_words_ids": Field(None, words, "forbidden sequences"),
    "sequence_bias": Field(None, biases, "bias on sequences"),
    "renormalize_logits": Field(False, boolean, "log-softmax last", False),
    "forced_bos_token_id": Field(None, integer(0), "the token after a single one"),
    "forced_eos_token_id": Field(None, token_id_or_ids, "the token at max_length"),
    "forced_decoder_ids": Field(None, anything, "removed in transformers 4.47", only=(None,)),
    "remove_invalid_values": Field(False, boolean, "mends NaN and infinities", False),
    "exponential_decay_length_penalty": Field(None, decay, "(start, factor) on end tokens"),
    "suppress_tokens": Field(None, token_ids, "forbidden tokens"),
    "begin_suppress_tokens": Field(None, token_ids, "forbidden as the first new token"),
    "token_healing": Field(False, boolean, "mends the prompt's tail; needs tokenizer=", False),
    "guidance_scale": Field(None, number("(-inf, inf)"), "classifier-free guidance; 1 is off"),
    "watermarking_config": Field(None, anything, "green lists or SynthID"),
    # Outputs
    "output_attentions": Field(False, boolean, "returns attentions of each step", False),
    "output_hidden_states": Field(False, boolean, "returns hidden states of each step", False),
    "output_scores": Field(False, boolean, "returns processed scores", False),
    "output_logits": Field(None, boolean, "returns raw logits"),
    "return_dict_in_generate": Field(False, boolean, "there is one form of result", UNSET),
    # Tokens
    "pad_token_id": Field(None, integer(0), "fills finished rows; the first end token if unset"),
    "bos_token_id": Field(None, integer(0), "starts an empty prompt"),
    "eos_token_id": Field(None, token_id_or_ids, _EOS),
    "decoder_start_token_id": Field(None, token_id_or_ids, "starts the decoder; bos if unset"),
    # Assisted generation
    "is_assistant": Field(None, anything, "metadata"),
    "num_assistant_tokens": Field(20, integer(1), "tokens of a draft", UNSET, "an assistant"),
    "num_assistant_tokens_schedule": Field(
        "constant",
        choice("constant", "heuristic", "heuristic_transient"),
        "heuristic: 2 more after a draft accepted whole, else 1 less",
        UNSET,
        "an assistant",
    ),
    "assistant_confidence_threshold": Field(
        0.4, number("[0, 1]"), "a draft ends with a less probable token", 0.0, "an assistant"
    ),
    "assistant_lookbehind": Field(10, integer(0), _UNIVERSAL, UNSET, "assistant_tokenizer"),
    "target_lookbehind": Field(10, integer(0), _UNIVERSAL, UNSET, "assistant_tokenizer"),
    "max_matching_ngram_size": Field(
        None, integer(1), "longest n-gram to look up; 2 if unset", needs="prompt_lookup_num_tokens"
    ),
    "prompt_lookup_num_tokens": Field(None, integer(1), "drafts of so many tokens of the text"),
    "assistant_early_exit": Field(None, integer(1), "drafts by so many of the model's layers"),
    "assistant_ensemble_weight": Field(
        None,
        number("(0, 1)"),
        "drafts are judged by w * model + (1 - w) * draft",
        None,
        "a draft",
    ),
    "speculation_type": Field(None, anything, _ASSISTED, only=(None,)),
    # Written by transformers, without meaning here
    "generation_kwargs": Field(None, anything, "of old versions", only=(None, {})),
    "transformers_version": Field(None, anything, "metadata"),
    "_from_model_config": Field(None, anything, "metadata"),
    "_commit_hash": Field(None, anything, "metadata"),
}
