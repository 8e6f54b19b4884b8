"""Reads byte-level BPE from files of ranks: tiktoken's format (Llama 3) and Mistral's tekken.json.

Both list the tokens as bytes, in the order in which BPE prefers them, and no merges. tiktoken joins
the two neighbours whose bytes together have the lowest rank. The tokenizers library gives the same
ids for the merges of all pairs of tokens that make a token, in the order of its rank.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self, TypeVar

from jaxllm.common.errors import TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.gguf_vocab import TEKKEN_PATTERN
from jaxllm.tokenizers.settings import LLAMA_TOKENS, TokenizerFiles, TokenizerSettings, named_tokens
from jaxllm.tokenizers.stream_decoder import byte_to_unicode
from jaxllm.tokenizers.tokenizer_json import (
    BYTE_LEVEL,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    FastTokenizer,
    split_before_bytes,
)
from jaxllm.tokenizers.tokenizer_json_check import MAX_BPE_ENTRIES, MAX_TOKEN_BYTES, MAX_VOCABULARY

T = TypeVar("T")
MAX_RANKED_BYTES = 2**23
"""Bytes of all tokens of a file together, each of which is a place to split a token."""
_PATTERNS = (TEKKEN_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)
_RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) +([0-9]{1,9})")
_FIRST_LINE = re.compile(_RANK_LINE.pattern + rb"[ \r]*(\n|\Z)")

_LLAMA3_NAMED = named_tokens(bos="<|begin_of_text|>", eos="<|end_of_text|>")
_FIRST, _HEADER = tuple(_LLAMA3_NAMED.values()), ("<|start_header_id|>", "<|end_header_id|>")
_RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(251)]
LLAMA3_SPECIAL = (*_FIRST, *_RESERVED[:4], *_HEADER, _RESERVED[4], "<|eot_id|>", *_RESERVED[5:])
LLAMA31_SPECIAL = (
    *(*_FIRST, *_RESERVED[:2], "<|finetune_right_pad_id|>", _RESERVED[2], *_HEADER),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_RESERVED[3:248]),
)
"""Special tokens after the ranks of Llama 3, and of Llama 3.1 to 3.3, as in tokenizer.json."""
_TEKKEN_VERSIONS = ("v1", "v2", "v3", "v7", "v11", "v13", "v15")
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of a tekken.json of the first four versions, which may leave out the list."""
_TEKKEN_FIELDS = {
    *("config", "vocab", "special_tokens", "version", "type"),
    *("image", "multimodal", "audio", "model_settings_builder"),  # change no ids of texts
}


class RankTokenizer(FastTokenizer):
    """A tokenizer from Llama 3's original tokenizer.model, in tiktoken's format, or from Mistral's
    tekken.json. ``save`` writes a tokenizer.json beside this file.

    Special tokens of Llama 3 come from tokenizer_config.json or added_tokens.json if these list one
    for the first id after the ranks. Otherwise they are Meta's: those of Llama 3.1 if config.json
    scales rotary embeddings as Llama 3.1 does, else those of Llama 3.
    """

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder with tokenizer.model or tekken.json."""
        name = "tokenizer.model" if is_tiktoken(files) else "tekken.json"
        files.refuse_options(("add_bos_token", "add_eos_token"), f"the ranks of {name}")
        source = str(files.folder / name)
        if name == "tekken.json":
            tokens, texts, pattern = read_tekken(files.json_object(name), source)
            special, named = dict(enumerate(texts)), {**LLAMA_TOKENS, **named_tokens(pad="<pad>")}
        else:
            tokens, pattern = read_tiktoken(files.contents[name], source), LLAMA3_PATTERN
            listed = [] if len(tokens) in settings.added else _llama3_special(files, settings)
            special, named = dict(enumerate(listed, len(tokens))), _LLAMA3_NAMED
        added = {index: AddedToken(text) for index, text in special.items()} | {**settings.added}
        known = {token.content for token in added.values()}
        settings = settings.with_defaults(**{k: v for k, v in named.items() if v in known})
        options = {
            "padding_side": "left",
            **settings.options,
            "add_bos_token": settings.flag("add_bos_token", True),
            "add_eos_token": settings.flag("add_eos_token", False),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        spec = {
            "added_tokens": [],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": split_before_bytes(pattern)},
            "decoder": {**BYTE_LEVEL, "use_regex": True},
            "model": bpe_model(tokens, special, source),
        }
        settings = replace(settings, added=dict(sorted(added.items())), options=options)
        tokenizer = cls(spec, settings, source=source)
        tokenizer._files[name] = files.contents[name]
        return tokenizer


def _llama3_special(files: TokenizerFiles, settings: TokenizerSettings) -> Sequence[str]:
    """The special tokens that the settings list, or else Meta's for the model in config.json."""
    listed = [token.content for token in settings.extra]
    config = files.model_config()
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_new = isinstance(scaling, dict) and "llama3" in scaling.values()
    own = LLAMA31_SPECIAL if is_new else LLAMA3_SPECIAL
    return listed if _FIRST[0] in listed else own


def is_tiktoken(files: TokenizerFiles) -> bool:
    """True if tokenizer.model begins with a token in base64 and its rank, as in tiktoken's format.

    A sentencepiece model begins with a byte that is no character of base64.
    """
    return _FIRST_LINE.match(files.contents.get("tokenizer.model", b"")) is not None


def read_tiktoken(content: bytes, source: str) -> list[bytes]:
    """Reads tiktoken's format, a line for each token: its bytes in base64, and its rank.

    Returns:
        Bytes of the tokens, by rank.
    """
    ranks: list[int] = []
    tokens: list[bytes] = []
    lines = content.split(b"\n")
    if len(lines) > 2 * MAX_VOCABULARY:
        raise TokenizerError(f"{source}: {len(lines)} lines, but at most {MAX_VOCABULARY} tokens")
    for number, line in enumerate(lines, 1):
        line = line.rstrip()
        if match := _RANK_LINE.fullmatch(line):
            ranks.append(int(match[2]))
            tokens.append(_from_base64(match[1], source))
        elif line:
            raise TokenizerError(
                f"{source}: line {number} is {quoted(line.decode('utf-8', 'replace'))}, not a token"
                " in base64 and its rank (tiktoken's format); download the file again"
            )
    return _by_rank(ranks, tokens, source)


def read_tekken(spec: Mapping[str, Any], source: str) -> tuple[list[bytes], list[str], str]:
    """Reads the object in a tekken.json.

    Returns:
        Bytes of the tokens by rank, special tokens by id, and the regular expression of words.
        The id of a token is its rank plus the number of special tokens.
    """
    if unknown := spec.keys() - _TEKKEN_FIELDS:
        raise UnsupportedError(f"{source}: unknown fields {quoted(sorted(unknown))}")
    config, where = spec.get("config"), f"{source}: config"
    if not isinstance(config, dict):
        raise TokenizerError(f"{where}: {type(config).__name__}, not an object")
    version, pattern = config.get("version"), config.get("pattern")
    if version not in _TEKKEN_VERSIONS:
        raise UnsupportedError(
            f"{where}: version is {quoted(version)}; supported are {', '.join(_TEKKEN_VERSIONS)}"
        )
    if pattern not in _PATTERNS:
        raise UnsupportedError(
            f"{where}: pattern is {quoted(pattern)}, which is none of the regular expressions that"
            " are known (those of Mistral Nemo, Llama 3 and Qwen2); use a tokenizer.json"
        )
    size: Any = config.get("default_vocab_size")
    count: Any = config.get("default_num_special_tokens")
    ranks, texts = _entries(spec.get("vocab"), "token_bytes", f"{source}: vocab")
    if not (
        type(size) is type(count) is int and 0 <= count <= size - 256 <= len(texts) - 256 + count
    ):
        raise TokenizerError(
            f"{where}: default_vocab_size is {quoted(size)} and default_num_special_tokens "
            f"{quoted(count)}, which leaves not 256 to {len(texts)} tokens of vocab"
        )
    listed = spec.get("special_tokens")
    if listed is None and version in _TEKKEN_VERSIONS[:4]:
        listed = [{"rank": i, "token_str": text} for i, text in enumerate(_TEKKEN_SPECIAL)]
    where = f"{source}: special_tokens"
    special = _by_rank(*_entries(listed, "token_str", where), where)
    special += [f"<SPECIAL_{number}>" for number in range(len(special), count)]
    if len(special) > count or len(set(special)) < len(special):
        raise TokenizerError(
            f"{where}: {len(special)} tokens, but config says {count} different ones"
        )
    ranked = _by_rank(ranks, texts, f"{source}: vocab")[: size - count]
    return [_from_base64(text, f"{source}: vocab") for text in ranked], special, pattern


def _entries(listed: object, name: str, source: str) -> tuple[list[int], list[str]]:
    """Ranks of a list's objects, and the texts that they have under `name`."""
    if not isinstance(listed, list) or len(listed) > MAX_VOCABULARY:
        raise TokenizerError(f"{source} is {quoted(listed)}, not a list of tokens")
    for number, entry in enumerate(listed):
        rank, text = (entry.get("rank"), entry.get(name)) if isinstance(entry, dict) else (0, 0)
        if type(rank) is not int or not isinstance(text, str) or not text:
            raise TokenizerError(f"{source}[{number}] is {quoted(entry)}, not a {name} with a rank")
    return [entry["rank"] for entry in listed], [entry[name] for entry in listed]


def _by_rank(ranks: Sequence[int], values: Sequence[T], source: str) -> list[T]:
    """The values by their ranks, which are the numbers from 0 on, each once."""
    by_rank = dict(zip(ranks, values, strict=True))
    found = [by_rank[rank] for rank in range(len(values)) if rank in by_rank]
    if len(found) < len(values):
        missing = next(rank for rank in range(len(values)) if rank not in by_rank)
        raise TokenizerError(f"{source}: no token has the rank {missing}, of {len(values)} tokens")
    return found


def bpe_model(tokens: Sequence[bytes], special: Mapping[int, str], source: str) -> dict[str, Any]:
    """The BPE model of a tokenizer.json with tiktoken's ids for the ranked tokens.

    Args:
        tokens: bytes of the tokens, by rank.
        special: special tokens by id, all before the ranked tokens or all after them.
        source: name of the file, for messages.
    """
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_BYTES or sum(map(len, tokens)) > MAX_RANKED_BYTES:
        raise TokenizerError(
            f"{source}: tokens of up to {longest} bytes, but at most {MAX_TOKEN_BYTES} are taken,"
            f" and {MAX_RANKED_BYTES} for all tokens together"
        )
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        twice = next(token for rank, token in enumerate(tokens) if ranks[token] != rank)
        raise TokenizerError(f"{source}: the token {quoted(str(twice))} has two ranks")
    table = byte_to_unicode()
    if lacking := [byte for byte in table if bytes([byte]) not in ranks]:
        raise TokenizerError(
            f"{source}: {len(lacking)} of the 256 bytes have no rank, such as {min(lacking)};"
            " texts with them could not be encoded"
        )
    names = [token.decode("latin-1").translate(table) for token in tokens]
    known = {*names}
    if shared := sorted(known.intersection(special.values())):
        raise TokenizerError(f"{source}: {quoted(shared[0])} is a special token and has a rank too")
    merges = (
        f"{left} {right}"  # which has no space in it
        for name in names
        for place in range(1, len(name))
        if (left := name[:place]) in known and (right := name[place:]) in known
    )
    return {
        "type": "BPE",
        "vocab": {
            name: index
            for index, name in enumerate([*(special.values() if 0 in special else ()), *names])
        },
        # One more than are taken, so that the check of the model counts too many.
        "merges": list(islice(merges, MAX_BPE_ENTRIES + 1)),
        "ignore_merges": True,
    }


def _from_base64(text: str | bytes, where: str) -> bytes:
    try:
        token = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # binascii.Error too
        token = b""
    if not token:
        raise TokenizerError(f"{where}: {quoted(str(text))} is not a token in base64")
    return token
