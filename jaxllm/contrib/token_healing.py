"""Token healing: replaces a prompt's last token by a longer one that begins with its text.

A prompt that is cut in the middle of a word, or of ``https://``, ends in a token that rarely stands
there in the training data, and the longer token that fits is out of reach. The algorithm is that of
``heal_tokens`` in transformers 5.23.0 (the idea: https://github.com/guidance-ai/guidance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.registration import register_prompt_transform
from jaxllm.tokenizers import Tokenizer

SequenceBias = dict[tuple[int, ...], float]
GenerateOne = Callable[[Int[np.ndarray, " T"], SequenceBias], int]


def heal_tokens(
    input_ids: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
    tokenizer: Tokenizer,
    generate_one: GenerateOne,
) -> tuple[Int[np.ndarray, "B U"], Bool[np.ndarray, "B U"]]:
    """The prompts with their last tokens chosen anew.

    As in transformers, also where one would not expect it:

    - A prompt is its text: special tokens and the white space around it are taken away, and the
      rest is tokenized again, with what the tokenizer puts around a text. The width may change.
    - BOS is replaced with the pad token, which then counts as a token of the prompt, but not in
      the choice of the last token where ``generate`` tells by the pad token what is padding.
    - Where the tokenizer pads on the right, or ends a text with EOS, the last column of a row is no
      word, and nothing is healed there.
    - A space in the last token's text is searched as the first character of the token `` `` or,
      in its absence, of the unknown token, usually ``<``: byte-level tokens that begin with a
      space are hardly ever healed.
    - Each extension has a bias of 10 and the last token itself of 11, which others may outdo.

    Three things differ. Where the last token's text is not its spelling and other tokens begin with
    that text (``▁wat``, ``wat``, ``water``), transformers fails with a KeyError; here the tokens
    that begin with the spelling are the extensions. The mask that transformers keeps is that of the
    ids before; here it fits the new ones. A tokenizer without BOS makes transformers fail; here it
    has nothing to replace.

    Args:
        input_ids: int ``[B, T]``, padded on either side.
        mask: bool ``[B, T]``, which of them are tokens.
        tokenizer: The model's tokenizer, with a pad token.
        generate_one: ``(row, sequence_bias) -> token``: the token that the model writes behind
            ``row``, int32 ``[U - 1]`` with pad tokens at its left end, under a bias as ``generate``
            takes it. In transformers that is a greedy or sampled choice after the model's own
            generation config, with ``pad_token_id`` the tokenizer's.

    Returns:
        int32 ``[B, U]``, padded on the tokenizer's side, and which columns are tokens.

    Raises:
        InputError: The ids are traced, the tokenizer is none or has no pad token, or no prompt has
            any text.
    """
    ids, real, pad = _tokenized_again(input_ids, mask, tokenizer)
    bos = tokenizer.bos_token_id
    if bos is not None:
        ids[ids == bos] = pad
    vocabulary = _vocabulary(tokenizer)
    for row in ids:
        words = row != pad
        alone = words.sum() == 1
        if len(row) == 1 or not words.any() or (alone and bos is None):
            continue
        bias = extension_bias(int(row[-1]), tokenizer, vocabulary)
        if len(bias) == 1:
            continue
        if alone:
            row[-2] = bos
        row[-1] = generate_one(row[:-1].copy(), bias)
    return ids, real


def extension_bias(tail: int, tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> SequenceBias:
    """A bias towards the tokens that begin with the text of ``tail``, and a little more to it.

    A single entry means that there is nothing to choose from.
    """
    space = tokenizer.token_to_id(" ")
    space = tokenizer.unk_token_id if space is None else space
    text = tokenizer.decode(tail)
    if space is not None:
        text = text.replace(" ", (tokenizer.id_to_token(space) or " ")[0])

    def beginning_with(prefix: str) -> SequenceBias:
        return {(i,): 10.0 for token, i in vocabulary.items() if token.startswith(prefix)}

    bias = beginning_with(text)
    if len(bias) > 1 and (tail,) not in bias:
        bias = beginning_with(tokenizer.id_to_token(tail) or "")
    return {**bias, (tail,): 11.0} if len(bias) > 1 else {(tail,): 10.0}


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    tokens = map(tokenizer.id_to_token, range(len(tokenizer)))
    return {token: index for index, token in enumerate(tokens) if token}


def _tokenized_again(
    input_ids: Any, mask: Any, tokenizer: Any
) -> tuple[Int[np.ndarray, "B U"], Bool[np.ndarray, "B U"], int]:
    if not isinstance(tokenizer, Tokenizer):
        raise InputError("token_healing: pass the model's tokenizer as `tokenizer`")
    if is_traced(input_ids) or is_traced(mask):
        raise InputError("token_healing: reads the prompt's text on the host, outside jax.jit")
    pad = tokenizer.pad_token_id
    if pad is None:
        raise InputError("token_healing: the tokenizer has no pad token, which stands for BOS")
    prompts = zip(np.asarray(input_ids), np.asarray(mask, bool), strict=True)
    texts = [tokenizer.decode(row[real], skip_special_tokens=True) for row, real in prompts]
    rows = [tokenizer.encode(text.strip()) for text in texts]
    width = max(map(len, rows), default=0)
    if width == 0:
        raise InputError(
            "token_healing: nothing is left of the prompts without special tokens and the white "
            "space around them"
        )
    ids = np.full((len(rows), width), pad, np.int32)
    real = np.zeros((len(rows), width), bool)
    left = tokenizer.padding_side == "left"
    for row, kept, found in zip(ids, real, rows, strict=True):
        columns = slice(width - len(found), None) if left else slice(len(found))
        row[columns] = found
        kept[columns] = True
        # Of a prompt without text one pad token is left, which the model begins from.
        kept[-1 if left else 0] = True
    return ids, real, pad


def heal(model: Any, tokenizer: Any, input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """The prompt transform of `token_healing`: :func:`heal_tokens` with the model itself."""
    if model.is_encoder_decoder:
        raise UnsupportedError("token_healing: is for prompts of decoder-only models")

    def next_token(row: np.ndarray, sequence_bias: Any) -> int:
        out = generate(
            model,
            jnp.asarray(row[None]),
            max_new_tokens=1,
            pad_token_id=tokenizer.pad_token_id,
            sequence_bias=sequence_bias,
            token_healing=False,
            do_sample=False,
        )
        return int(out.sequences[0, -1])

    if input_ids is None or is_traced(input_ids) or is_traced(attention_mask):
        raise InputError("token_healing: needs input_ids that are known outside jax.jit")
    if attention_mask is None:
        attention_mask = np.ones(np.shape(input_ids), bool)
    return heal_tokens(np.asarray(input_ids), np.asarray(attention_mask), tokenizer, next_token)


register_prompt_transform("token_healing", heal)
