"""Token healing: replaces a prompt's last token by a longer one that begins with its text.

A prompt cut in the middle of a word, or of ``https://``, ends in a token that is rare there in the
training data, and generation cannot reach the longer token that fits. The algorithm is that of
``heal_tokens`` in transformers 5.23.0 (the idea: https://github.com/guidance-ai/guidance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.arguments import TokenRows
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.registration import register_prompt_transform
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers import Tokenizer

SequenceBias = dict[tuple[int, ...], float]
GenerateOne = Callable[[Int[np.ndarray, " T"], SequenceBias], int]


def heal_tokens(
    input_ids: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
    tokenizer: Tokenizer,
    generate_one: GenerateOne,
) -> tuple[Int[np.ndarray, "B U"], Bool[np.ndarray, "B U"]]:
    """Regenerates the last token of each prompt.

    Same as transformers, also in these surprising cases:

    - The prompt is decoded without special tokens, stripped of white space, and tokenized again,
      with the special tokens that the tokenizer adds. The width may change.
    - BOS is replaced by the pad token, which then counts as a token of the prompt, but not in the
      choice of the last token if ``generate`` derives the padding mask from the pad token.
    - A row whose last column is a pad (the tokenizer pads on the right) or EOS is not healed.
    - A space in the last token's text is searched as the first character of the token `` `` or, if
      there is none, of the unknown token, usually ``<``: byte-level tokens that begin with a space
      are hardly ever healed.
    - Each extension has a bias of 10 and the last token itself of 11; other tokens may score
      higher.

    Three things differ. If the last token's text is not its spelling and other tokens begin with
    that text (``▁wat``, ``wat``, ``water``), transformers raises a KeyError; here the extensions
    are the tokens that begin with the spelling. transformers keeps the mask of the old ids; here
    it matches the new ids. Without a BOS token transformers fails; here none is replaced.

    Args:
        input_ids: int ``[B, T]``, padded on either side.
        mask: bool ``[B, T]``, padding mask, True at tokens.
        tokenizer: the model's tokenizer, with a pad token.
        generate_one: ``(row, sequence_bias) -> token``: generates the token after ``row``, int32
            ``[U - 1]`` left-padded with pad tokens, with a ``sequence_bias`` as in ``generate``. In
            transformers it is chosen greedily or sampled, by the model's own generation config with
            the tokenizer's ``pad_token_id``.

    Returns:
        int32 ``[B, U]``, padded on the tokenizer's side, and the padding mask, bool ``[B, U]``.

    Raises:
        InputError: the ids are traced, the tokenizer is missing or has no pad token, or all prompts
            are empty without special tokens and white space.
    """
    ids, real, pad = _retokenize(input_ids, mask, tokenizer)
    bos = tokenizer.bos_token_id
    if bos is not None:
        ids[ids == bos] = pad
    vocabulary = _vocabulary(tokenizer)
    for row in ids:
        token_count = (row != pad).sum()
        if len(row) == 1 or token_count == 0 or (token_count == 1 and bos is None):
            continue
        bias = extension_bias(int(row[-1]), tokenizer, vocabulary)
        if len(bias) == 1:
            continue
        if token_count == 1:
            row[-2] = bos
        row[-1] = generate_one(row[:-1].copy(), bias)
    return ids, real


def extension_bias(
    last_token: int, tokenizer: Tokenizer, vocabulary: Mapping[str, int]
) -> SequenceBias:
    """Sequence bias: 10 for tokens that begin with the text of ``last_token``, 11 for itself.

    A single entry means that no token extends ``last_token``.
    """
    space = tokenizer.token_to_id(" ")
    space = tokenizer.unk_token_id if space is None else space
    text = tokenizer.decode(last_token)
    if space is not None:
        text = text.replace(" ", (tokenizer.id_to_token(space) or " ")[0])

    def beginning_with(prefix: str) -> SequenceBias:
        return {(i,): 10.0 for token, i in vocabulary.items() if token.startswith(prefix)}

    bias = beginning_with(text)
    if len(bias) > 1 and (last_token,) not in bias:
        bias = beginning_with(tokenizer.id_to_token(last_token) or "")
    return {**bias, (last_token,): 11.0} if len(bias) > 1 else {(last_token,): 10.0}


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    tokens = map(tokenizer.id_to_token, range(len(tokenizer)))
    return {token: index for index, token in enumerate(tokens) if token}


def _retokenize(
    input_ids: ArrayLike, mask: ArrayLike, tokenizer: Tokenizer
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
    pads_left = tokenizer.padding_side == "left"
    for row, row_mask, tokens in zip(ids, real, rows, strict=True):
        columns = slice(width - len(tokens), None) if pads_left else slice(len(tokens))
        row[columns] = tokens
        row_mask[columns] = True
        # A prompt without text keeps one pad token, from which the model starts.
        row_mask[-1 if pads_left else 0] = True
    return ids, real, pad


def heal(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    input_ids: TokenRows | None,
    attention_mask: TokenRows | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt transform of `token_healing`: :func:`heal_tokens` with greedy choices of the model."""
    if model.is_encoder_decoder:
        raise UnsupportedError("token_healing: is for prompts of decoder-only models")

    def next_token(row: np.ndarray, sequence_bias: SequenceBias) -> int:
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
