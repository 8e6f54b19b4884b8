"""Logits processors and warpers, under the names they have in transformers."""

from __future__ import annotations

from jaxllm.generation.processors.base import (
    LogitsProcessor,
    LogitsProcessorList,
    logits_processor,
)
from jaxllm.generation.processors.bias import (
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from jaxllm.generation.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from jaxllm.generation.processors.host.prefix import PrefixConstrainedLogitsProcessor
from jaxllm.generation.processors.host.python_function import HostLogitsProcessor
from jaxllm.generation.processors.lengths import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from jaxllm.generation.processors.ngrams import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)
from jaxllm.generation.processors.openai_penalties import (
    FrequencyPenaltyLogitsProcessor,
    LogitBiasLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from jaxllm.generation.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    HammingDiversityLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from jaxllm.generation.processors.tokens import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from jaxllm.generation.processors.warpers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

__all__ = [
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "FrequencyPenaltyLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "HostLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "PresencePenaltyLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "logits_processor",
]
