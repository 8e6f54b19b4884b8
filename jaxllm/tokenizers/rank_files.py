"""Reads byte-level BPE from files of ranks: tiktoken's format (Llama 3) and Mistral's tekken.json.

Both list the bytes of tokens by rank, and no merges. tiktoken joins the two neighbours whose bytes
together have the lowest rank. The tokenizers library gives the same ids if all pairs of tokens that
make a token are merges, in the order of its rank.
"""

from __future__ import annotations

import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, Self

from jaxllm.common.errors import TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.gguf_vocab import TEKKEN_PATTERN
from jaxllm.tokenizers.settings import RANK_LINE, TokenizerFiles, TokenizerSettings
from jaxllm.tokenizers.stream_decoder import byte_to_unicode
from jaxllm.tokenizers.tokenizer_json import (
    BYTE_LEVEL,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    FastTokenizer,
    split_before_bytes,
)
from jaxllm.tokenizers.tokenizer_json_check import MAX_BPE_ENTRIES, MAX_VOCABULARY

MAX_RANKED_TOKEN_BYTES, MAX_RANKED_BYTES = 256, 2**23
"""Most bytes of a token, and of all tokens of a file. Each byte is a place to split a token, and
each merge has a copy of the token."""
_PATTERNS = (TEKKEN_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)
_BEGIN = ("<|begin_of_text|>", "<|end_of_text|>")
_HEADER = ("<|start_header_id|>", "<|end_header_id|>")
_NAMES = ("bos", "eos", "bos", "eos", "unk", "pad")
_NAMED_TEXTS = (*_BEGIN, "<s>", "</s>", "<unk>", "<pad>")
_NAMED: Mapping[str, str] = dict(zip(_NAMED_TEXTS, _NAMES, strict=True))
"""Names of the special tokens that are named tokens."""
_LLAMA3 = (*_BEGIN, *[""] * 4, *_HEADER, "", "<|eot_id|>")
_LLAMA31 = (
    *(*_BEGIN, "", "", "<|finetune_right_pad_id|>", "", *_HEADER),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
"""First special tokens of Llama 3, and of 3.1 to 3.3, as in the published tokenizer.json; "" stands
for the next reserved one. There are 256."""
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of a tekken.json that lists none, which the first versions may do."""
_VERSIONS = ("v1", "v2", "v3", "v7", "v11", "v13", "v15")
_SIZES = ("num_vocab_tokens", "default_vocab_size", "default_num_special_tokens")
_FIELDS = {
    *("config", "vocab", "special_tokens", "version", "type", "pattern", *_SIZES),
    *("image", "multimodal", "audio", "model_settings_builder"),  # change no ids of texts
}


class RankTokenizer(FastTokenizer):
    """Llama 3's tokenizer from its original tokenizer.model, or Mistral's from tekken.json.

    ``save`` writes a tokenizer.json beside this file. Llama's special tokens come from
    tokenizer_config.json or added_tokens.json if they list one for the first id after the ranks.
    Otherwise they are Meta's: Llama 3.1's if config.json scales rotary embeddings in its way.
    """

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder with tokenizer.model in tiktoken's format, or with tekken.json."""
        name = files.rank_file or "tekken.json"
        source = str(files.folder / name)
        files.refuse_options(("add_bos_token", "add_eos_token"), f"the ranks of {name}")
        if files.rank_file:
            tokens, pattern = read_tiktoken(files.contents[name], source), LLAMA3_PATTERN
            special = [] if len(tokens) in settings.added else _llama3_special(files, settings)
            model, first = bpe_model(tokens, (), source), len(tokens)
        else:
            tokens, special, pattern = read_tekken(files.json_object(name), source)
            model, first = bpe_model(tokens, special, source), 0
        added = {index: AddedToken(text) for index, text in enumerate(special, first)}
        added = dict(sorted((added | {**settings.added}).items()))
        named = {f"{_NAMED[str(t)]}_token": str(t) for t in added.values() if str(t) in _NAMED}
        options = {
            "padding_side": "left",
            **settings.options,
            "add_bos_token": settings.flag("add_bos_token", True),
            "add_eos_token": settings.flag("add_eos_token", False),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        steps = split_before_bytes(pattern)
        spec = {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**BYTE_LEVEL, "use_regex": True},
            "model": model,
        }
        settings = replace(settings.with_defaults(**named), added=added, options=options)
        tokenizer = cls(spec, settings, source=source)
        tokenizer._files[name] = files.contents[name]
        return tokenizer


def _llama3_special(files: TokenizerFiles, settings: TokenizerSettings) -> list[str]:
    """The listed special tokens, or Meta's. All models have the same tokenizer.model."""
    if _BEGIN[0] in (listed := [token.content for token in settings.extra]):
        return listed
    config = files.model_config()
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    is_scaled = isinstance(scaling, dict) and "llama3" in scaling.values()
    texts, reserved = (*(_LLAMA31 if is_scaled else _LLAMA3), *[""] * 256)[:256], count()
    return [text or f"<|reserved_special_token_{next(reserved)}|>" for text in texts]


def read_tiktoken(content: bytes, source: str) -> list[bytes]:
    """Reads tiktoken's format, a line for each token. Returns the tokens by rank."""
    if content.count(b"\n") > MAX_VOCABULARY:
        raise TokenizerError(f"{source}: more than {MAX_VOCABULARY} lines")
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        match, where = RANK_LINE.fullmatch(line), f"{source}: line {number}"
        if match is None and line.strip():
            raise TokenizerError(
                f"{where} is {quoted(line.decode('utf-8', 'replace'))}, not a token in base64 and"
                " its rank (tiktoken's format); download the file again"
            )
        if match is not None:
            if (rank := int(match[2])) in tokens:
                raise TokenizerError(f"{where}: a second token has the rank {rank}")
            tokens[rank] = _from_base64(match[1], where)
    if missing := tokens and set(range(len(tokens))) - tokens.keys():
        raise TokenizerError(
            f"{source}: no token has the rank {min(missing)}, though ranks go up to {max(tokens)}"
        )
    return [tokens[rank] for rank in range(len(tokens))]


def read_tekken(spec: Mapping[str, Any], source: str) -> tuple[list[bytes], list[str], str]:
    """Reads a tekken.json. Returns tokens by rank, special tokens by id, and the regular expression
    of words. The id of a token is its rank plus the number of special tokens."""
    config: Any = spec.get("config") if isinstance(spec.get("config"), dict) else {}
    if unknown := (spec.keys() | config.keys()) - _FIELDS:
        raise UnsupportedError(f"{source}: unknown fields {quoted(sorted(unknown))}")
    version, pattern = config.get("version"), config.get("pattern")
    if version not in _VERSIONS or pattern not in _PATTERNS:
        raise UnsupportedError(
            f"{source}: config: version is {quoted(version)} and pattern {quoted(pattern)};"
            f" supported are {', '.join(_VERSIONS)} with the regular expression of Mistral Nemo,"
            " Llama 3 or Qwen2. Make a tokenizer.json of it"
        )
    special = list(_TEKKEN)
    if version not in _VERSIONS[:4] or spec.get("special_tokens") is not None:
        special = _texts(spec.get("special_tokens"), "token_str", f"{source}: special_tokens")
    listed = _texts(spec.get("vocab"), "token_bytes", f"{source}: vocab")
    sizes: list[Any] = [config.get(name) for name in _SIZES]
    number = sizes[2]
    if not (
        set(map(type, sizes)) == {int}
        and len(special) <= number
        and number + 256 <= sizes[1] <= min(number + len(listed), MAX_VOCABULARY)
    ):
        raise TokenizerError(
            f"{source}: config: {', '.join(_SIZES)} are {quoted(sizes)}, which does not fit"
            f" {len(listed)} tokens, 256 or more of them bytes, and {len(special)} special tokens"
        )
    special += [f"<SPECIAL_{index}>" for index in range(len(special), number)]
    tokens = [_from_base64(x, f"{source}: vocab") for x in listed[: sizes[1] - number]]
    return tokens, special, pattern


def _texts(entries: object, field: str, where: str) -> list[str]:
    """A field of each object in a list, where every object's ``rank`` must be its index."""
    if not isinstance(entries, list):
        raise TokenizerError(f"{where} is {quoted(entries)}, not a list")
    for rank, entry in enumerate(entries):
        fields = entry if isinstance(entry, dict) else {}
        text = fields.get(field)
        if fields.get("rank") != rank or not isinstance(text, str) or not text:
            raise TokenizerError(
                f"{where}[{rank}] is {quoted(entry)}, not an object with {field} and rank {rank}"
            )
    return [entry[field] for entry in entries]


def bpe_model(tokens: Sequence[bytes], first: Collection[str], source: str) -> dict[str, Any]:
    """A tokenizer.json's BPE model: the tokens `first`, and then the ranked tokens in order."""
    longest = max(map(len, tokens), default=0)
    if longest > MAX_RANKED_TOKEN_BYTES or sum(map(len, tokens)) > MAX_RANKED_BYTES:
        raise TokenizerError(
            f"{source}: a token of {longest} bytes, but at most {MAX_RANKED_TOKEN_BYTES} are"
            f" taken, and {MAX_RANKED_BYTES} for all tokens together"
        )
    table = byte_to_unicode()
    names = [token.decode("latin-1").translate(table) for token in tokens]
    known, every = {*names}, [*first, *names]
    vocab = {name: index for index, name in enumerate(every)}
    if twice := [name for index, name in enumerate(every) if vocab[name] != index]:
        raise TokenizerError(f"{source}: the token {quoted(twice[0])} appears twice")
    if missing := set(table.values()) - known:
        raise TokenizerError(f"{source}: {len(missing)} of the 256 single bytes are no tokens")
    merges = (
        f"{left} {right}"
        for name in names
        for place in range(1, len(name))
        if (left := name[:place]) in known and (right := name[place:]) in known
    )
    # With one more merge than are taken, the check of the model fails.
    merges = list(islice(merges, MAX_BPE_ENTRIES + 1))
    return {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True}


def _from_base64(text: str | bytes, where: str) -> bytes:
    try:
        if token := binascii.a2b_base64(text, strict_mode=True):
            return token
    except ValueError:
        pass
    raise TokenizerError(f"{where}: {quoted(str(text))} is not a token in base64")
