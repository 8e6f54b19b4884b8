"""Tokenizers: sentencepiece, tokenizer.json, GGUF vocabularies, chat templates."""

from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.batch import BatchEncoding, ListEncoding, bucket_length
from jaxllm.tokenizers.byte_level import ByT5Tokenizer
from jaxllm.tokenizers.gguf_vocab import tokenizer_from_gguf
from jaxllm.tokenizers.loading import load_tokenizer
from jaxllm.tokenizers.sentencepiece_tokenizers import LlamaTokenizer, T5Tokenizer
from jaxllm.tokenizers.stream_decoder import StreamDecoder
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json import FastTokenizer, GPT2Tokenizer

__all__ = [
    "AddedToken",
    "BatchEncoding",
    "ByT5Tokenizer",
    "FastTokenizer",
    "GPT2Tokenizer",
    "ListEncoding",
    "LlamaTokenizer",
    "StreamDecoder",
    "T5Tokenizer",
    "Tokenizer",
    "bucket_length",
    "load_tokenizer",
    "tokenizer_from_gguf",
]
