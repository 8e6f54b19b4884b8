"""`score()`: log-likelihoods of given completions, without generating; and
`compute_transition_scores()`: scores of generated tokens.

The public names are in `jaxllm`: `score`, `ScoreOutput`, `compute_transition_scores`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.arguments import (
    checked,
    checked_count,
    checked_iterable,
    checked_list,
    checks_flags,
)
from jaxllm.common.errors import InputError, NonFiniteError, quoted
from jaxllm.generation.inputs.arguments import TokenRows, padded_rows, run_in_batches
from jaxllm.generation.inputs.values import any_traced, is_traced
from jaxllm.generation.request import decoder_prompt
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.resolve import target_settings
from jaxllm.generation.strategies.draws import choose_greedy
from jaxllm.models.decoder import Decoder, GenerativeModel, checked_generative
from jaxllm.models.decoder_only import with_rope_per_row
from jaxllm.models.input_checks import mask_of, on_host
from jaxllm.parallel.placement import mesh_of, put_rows
from jaxllm.parallel.sharding import constrain, use_mesh
from jaxllm.tokenizers.chats import shared_length
from jaxllm.tokenizers.tokenizer import Tokenizer

MOST_LOGIT_BYTES = 2**26
"""Largest size of a block of logits in bytes; limits the columns that are scored at a time."""


@dataclasses.dataclass(frozen=True)
class ScoreOutput:
    """Output of `score`, as numpy arrays; N pairs in the order given."""

    log_likelihoods: Float[np.ndarray, " N"]
    """float32. Log-probability of each completion given its prompt: the sum over its tokens."""
    is_greedy: Bool[np.ndarray, " N"]
    """True if every token of the completion is the most likely one at its position, as greedy
    search without logits processors chooses it. Ties go to the lowest token id."""
    token_log_probs: list[Float[np.ndarray, " _"]]
    """float32. Log-probability of each token of each completion."""


def score(
    model: GenerativeModel,
    prompts: TokenRows | Sequence[str],
    completions: TokenRows | Sequence[str],
    tokenizer: Tokenizer | None = None,
    *,
    attention_mask: Int[Array, "N T"] | None = None,
    completion_mask: Int[Array, "N T"] | None = None,
    batch_size: int = 32,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
) -> ScoreOutput:
    """Computes log-likelihoods of completions, and whether greedy search would generate them.

    The pair (log_likelihood, is_greedy) answers a ``loglikelihood`` request of
    lm-evaluation-harness: prompts are its encoded contexts, completions its continuations.
    A causal model reads prompt and completion as one sequence. An encoder-decoder reads the prompt
    with its encoder, and the completion with its decoder, after the start token.

    ::

        model, tokenizer = jaxllm.load("smollm2")
        out = jaxllm.score(model, ["The sky is"] * 2, [" blue.", " a fish."], tokenizer)
        out.log_likelihoods.argmax()  # 0

    Args:
        model: a causal or encoder-decoder language model.
        prompts: N lists of token ids of any lengths, or an array [N, T] with `attention_mask`. For
            a causal model an empty prompt means its BOS token.
        completions: N lists of token ids, or an array [N, T] with `completion_mask`. Nothing is
            added to them: include the end token of a completion that ends.
        tokenizer: the model's, if `prompts` and `completions` are texts; see `text_pair`.
        attention_mask: 1 at real tokens of `prompts`, padded on either side; None: all tokens.
        completion_mask: the same for `completions`.
        batch_size: pairs computed at once; with the longest pair it determines the memory needed.
            Logits never take more than 64 MiB, or one column of all pairs. Pairs of similar length
            are batched together; results do not depend on it.
        src_lang, tgt_lang: languages of texts, for translation models; None: the tokenizer's.

    Returns:
        ScoreOutput with numpy arrays.

    Raises:
        InputError: an empty completion, ids outside the vocabulary, a pair longer than the model's
            positions, or a call inside jax.jit (pairs are sorted by length on the host).
        NonFiniteError: the model gave NaN or infinite logits; the message names the pair.
    """
    ids: tuple[Any, Any] = (prompts, completions)
    if tokenizer is None and (src_lang or tgt_lang):
        raise InputError("src_lang, tgt_lang: have no effect on token ids; leave them out")
    if tokenizer is not None:
        tokenizer = tokenizer.with_languages(src_lang, tgt_lang)
        texts = (_texts("prompts", prompts), _texts("completions", completions))
        if len(texts[0]) != len(texts[1]):
            raise InputError(f"completions: {len(texts[1])} for {len(texts[0])} prompts")
        if checked_generative(model, "score").is_encoder_decoder:
            model = with_target_language(model, tokenizer)
        rows = enumerate(zip(*texts, strict=True))
        pairs = [text_pair(model, tokenizer, i, *row) for i, row in rows]
        ids = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    scores = stream_scores(
        model,
        *ids,
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        batch_size=batch_size,
    )
    _, token_log_probs, is_greedy = zip(*sorted(scores, key=lambda score: score[0]), strict=True)
    return ScoreOutput(
        log_likelihoods=np.array([x.sum() for x in token_log_probs], np.float32),
        is_greedy=np.array(is_greedy, bool),
        token_log_probs=list(token_log_probs),
    )


def with_target_language(model: Any, tokenizer: Any, tgt_lang: str | None = None) -> Any:
    """An encoder-decoder that writes in the language of `target_settings`."""
    return model.with_card(generation_config=target_settings(model, tokenizer, None, tgt_lang))


def text_pair(
    model: GenerativeModel, tokenizer: Tokenizer, i: int, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """The token ids of pair number i, without an end token of the completion.

    For a causal model both are tokenized as one text: the completion begins where the tokens differ
    from those of the prompt alone. An encoder reads the prompt with the end token that its
    tokenizer adds, and the completion is a target of the tokenizer.
    """
    if model.is_encoder_decoder:
        tokenizer.check_not_blank(prompt, f"prompts[{i}]")
        tokenizer.check_not_blank(completion, f"completions[{i}]")
        ids = tokenizer.encode_target(completion, model.generation_config)
        return tokenizer.encode(prompt), ids
    head, whole = (tokenizer.encode_beginning(text) for text in (prompt, prompt + completion))
    start = shared_length(head, whole)
    return whole[:start], whole[start:]


def _texts(name: str, values: Any) -> list[str]:
    texts = list(checked_list(values, name))
    for i, text in enumerate(texts):
        checked(text, (str,), f"{name}[{i}]", "a text, since there is a tokenizer")
    return texts


def stream_scores(
    model: GenerativeModel,
    prompts: TokenRows,
    completions: TokenRows,
    *,
    attention_mask: TokenRows | None = None,
    completion_mask: TokenRows | None = None,
    batch_size: int = 32,
) -> Iterator[tuple[int, Float[np.ndarray, " _"], bool]]:
    """Yields the score of each pair as its batch ends, the longest pairs first: the pair's index,
    the log-probabilities of the completion's tokens, and whether greedy search generates it.

    Arguments and errors are those of `score`.
    """
    pairs = read_pairs(model, prompts, completions, attention_mask, completion_mask)
    checked_count(batch_size, "batch_size")
    run = batch_scorer(model)
    for i, scores in run_in_batches(run, pairs, batch_size, length=lambda pair: pair.size):
        log_probs, is_best, is_finite = (x[: len(pairs[i].completion)] for x in scores)
        if not is_finite.all():
            raise NonFiniteError(
                f"score: the model's logits for pair {i} are NaN or infinite; check the weights, "
                "or compute in float32 (dtype='float32')"
            )
        yield i, log_probs, bool(is_best.all())


def batch_scorer(model: GenerativeModel) -> Callable[[list[Pair]], list[tuple[np.ndarray, ...]]]:
    """Returns a function that scores a batch of pairs: for each the results of `_score_batch`."""
    per_row, mesh = with_rope_per_row(model), mesh_of(model)

    def run(batch: list[Pair]) -> list[tuple[np.ndarray, ...]]:
        arrays = padded_pairs(batch)
        if mesh is not None:
            arrays = put_rows(arrays, mesh)
        with use_mesh(mesh):
            return list(zip(*jax.device_get(_score_batch(per_row, *arrays)), strict=True))

    return run


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and its completion as the model's inputs and targets."""

    encoder: Int[np.ndarray, " E"] | None
    decoder: Int[np.ndarray, " T"]
    completion: Int[np.ndarray, " C"]
    """Predicted by the last C columns of `decoder`."""

    @property
    def size(self) -> int:
        return len(self.decoder) + (0 if self.encoder is None else len(self.encoder))


def read_pairs(
    model: GenerativeModel,
    prompts: TokenRows,
    completions: TokenRows,
    attention_mask: TokenRows | None,
    completion_mask: TokenRows | None,
) -> list[Pair]:
    """Checks the arguments of `score` and builds the pairs."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if is_list and len(prompts) and isinstance(prompts[0], str):
        raise InputError("prompts: texts need a tokenizer: score(model, texts, texts, tokenizer)")
    model = checked_generative(model, "score")
    # Inside the caller's jit even a constant is traced.
    if is_traced(jnp.zeros(())) or any_traced(prompts, completions, model):
        raise InputError("score: sorts its pairs on the host; call it outside jax.jit")
    size = model.config.vocab_size
    prompt_ids = token_rows("prompts", prompts, attention_mask, "attention_mask", size)
    new_ids = token_rows("completions", completions, completion_mask, "completion_mask", size)
    if len(prompt_ids) != len(new_ids):
        raise InputError(f"completions: {len(new_ids)} for {len(prompt_ids)} prompts")
    rows = zip(prompt_ids, new_ids, strict=True)
    return [make_pair(model, i, *pair) for i, pair in enumerate(rows)]


def make_pair(model: GenerativeModel, i: int, prompt: np.ndarray, completion: np.ndarray) -> Pair:
    """The columns of one pair. The last token predicts nothing, and is not read."""
    if completion.size == 0:
        raise InputError(f"completions[{i}]: empty; it must have one token or more")
    if model.is_encoder_decoder:
        if prompt.size == 0:
            raise InputError(f"prompts[{i}]: empty; the encoder needs one token or more")
        settings = model.generation_config or GenerationConfig()
        start = decoder_prompt(model, None, None, 1, settings).ids[0]
        return Pair(prompt, np.concatenate([start, completion[:-1]]), completion)
    if prompt.size == 0:
        bos = model.checked_card("score").config.bos_token_id
        if bos is None:
            raise InputError(f"prompts[{i}]: empty, and the model has no BOS token")
        prompt = np.array([bos], np.int32)
    decoder = np.concatenate([prompt, completion[:-1]])
    limit = model.config.max_positions
    if limit is not None and len(decoder) > limit:
        raise InputError(
            f"prompts[{i}]: {len(decoder) + 1} tokens with its completion, but this model has "
            f"{limit} positions"
        )
    return Pair(None, decoder, completion)


def padded_pairs(pairs: list[Pair]) -> tuple[Any, ...]:
    """Arguments of `_score_batch`, padded to buckets."""
    decoder, mask = padded_rows([pair.decoder for pair in pairs])
    targets, _ = padded_rows([pair.completion for pair in pairs])
    first_column = np.array([len(p.decoder) - len(p.completion) for p in pairs], np.int32)
    encoder: dict[str, Any] = {}
    encoder_rows = [pair.encoder for pair in pairs if pair.encoder is not None]
    if encoder_rows:
        encoder["input_ids"], encoder["attention_mask"] = padded_rows(encoder_rows)
    return encoder, decoder, mask, first_column, targets


@jax.jit
def _score_batch(
    model: Decoder,
    encoder: dict[str, Any],
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    first_column: Int[Array, " B"],
    targets: Int[Array, "B C"],
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"], Bool[Array, "B C"]]:
    """The log-probability of each target, whether it is the best token, whether logits are finite.

    Row b's first target is predicted by its column first_column[b].
    """
    B, T = tokens.shape
    cache = model.init_cache(B, T, **encoder)
    x = model.decode(tokens, mask, cache, cache_is_empty=True).last_hidden_state
    C = targets.shape[1]
    columns = jnp.minimum(first_column[:, None] + jnp.arange(C)[None], T - 1)
    x = jnp.take_along_axis(x, columns[..., None], axis=1)

    def score_block(block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, target = block
        logits = model.logits(hidden)
        value = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        log_prob = value - jax.nn.logsumexp(logits, axis=-1)
        best = choose_greedy(logits.reshape(-1, logits.shape[-1])).reshape(target.shape)
        return log_prob, best == target, jnp.isfinite(jnp.max(logits, axis=-1))

    # A loop over blocks of columns, so that the logits of all columns are never in memory at once.
    width = max(MOST_LOGIT_BYTES // (4 * B * model.config.vocab_size), 1)
    blocks = 1
    while C // blocks > width:
        blocks *= 2

    def in_blocks(y: Array) -> Array:
        return jnp.moveaxis(y.reshape(B, blocks, C // blocks, *y.shape[2:]), 1, 0)

    results = jax.lax.map(score_block, (in_blocks(x), in_blocks(targets)))
    return constrain(jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(B, C), results))


def token_rows(
    name: str, rows: TokenRows, mask: TokenRows | None, mask_name: str, vocab_size: int
) -> list[Int[np.ndarray, " _"]]:
    """The real tokens of each row, as int32."""
    checked_iterable(rows, name, "a list of rows of token ids")
    masks = None if mask is None else checked_list(mask, mask_name)
    given_rows = list(rows)
    if masks is not None and len(masks) != len(given_rows):
        raise InputError(f"{mask_name}: {len(masks)} rows, but {name} has {len(given_rows)}")
    token_ids = []
    for i, row in enumerate(given_rows):
        ids = on_host(f"{name}[{i}]", row)
        if ids.size == 0:
            ids = ids.astype(np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            hint = "; encode it with tokenizer.encode(text)" if isinstance(row, str) else ""
            raise InputError(
                f"{name}[{i}]: expected a list of token ids, found {quoted(row)}{hint}"
            )
        if masks is not None:
            ids = ids[mask_of(f"{mask_name}[{i}]", masks[i], ids.shape)]
        bad = (ids < 0) | (ids >= vocab_size)
        if bad.any():
            raise InputError(
                f"{name}[{i}]: id {ids[bad][0]} is not in the vocabulary (0 to {vocab_size - 1})"
            )
        token_ids.append(ids.astype(np.int32))
    if not token_ids:
        raise InputError(f"{name}: no rows")
    return token_ids


@checks_flags
def compute_transition_scores(
    sequences: Int[Array, "R L"],
    scores: Sequence[Float[Array, "Rows V"]],
    beam_indices: Int[Array, "R N"] | None = None,
    normalize_logits: bool = False,
) -> Float[Array, "R M"]:
    """Score of each generated token, selected from `scores`.

    Equivalent to the method of that name in transformers (5.23.0). With beams, the sum over a row
    divided by its length to the power `length_penalty` is its `sequences_scores`.

    Args:
        sequences: as `generate` returns them.
        scores: one [rows, V] for each step (`output_scores`); with beams a row is a beam.
        beam_indices: with beams, the row of `scores` that each token of each result was chosen
            from; -1 after the result's end. None: row b was chosen from row b.
        normalize_logits: take the log-softmax of the scores first.

    Returns:
        float32 [R, M]: with `beam_indices` M is the length of the longest result (under jax.jit:
        the columns of `beam_indices`), and scores after a result's end are 0. Without, N is the
        number of steps, and entries after a row's end are scores of pads, as in transformers.

    Raises:
        InputError: shapes that do not fit together, or tokens or beams that scores do not have.

    >>> sequences = jnp.array([[7, 1, 0]])  # one token of prompt
    >>> scores = (jnp.array([[-0.5, -0.1]]), jnp.array([[-0.2, -0.7]]))
    >>> [round(float(s), 1) for s in compute_transition_scores(sequences, scores)[0]]
    [-0.1, -0.2]
    """
    scores = checked_list(scores, "scores")
    if len(scores) == 0:
        raise InputError("scores: empty; ask for them with output_scores=True")
    stacked = _array("scores", scores, jnp.floating, 3).astype(jnp.float32)
    steps, rows, vocabulary = stacked.shape
    sequences = _array("sequences", sequences, jnp.integer, 2)
    if normalize_logits:
        stacked = jax.nn.log_softmax(stacked, axis=-1)
    if beam_indices is None:
        beam_indices = jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, steps))
    beam_indices = _array("beam_indices", beam_indices, jnp.integer, 2)
    if beam_indices.shape[:1] != sequences.shape[:1]:
        raise InputError(
            f"beam_indices: {beam_indices.shape[0]} rows for {sequences.shape[0]} sequences; "
            "results of beam search need the beam_indices that came with them"
        )
    has_token = beam_indices >= 0
    # Steps without a token are -1 in all rows; the others give the number of new tokens.
    length = beam_indices.shape[1] if is_traced(has_token) else int(has_token.sum(axis=1).max())
    if length > min(steps, sequences.shape[1]):
        raise InputError(
            f"beam_indices: {length} tokens, but there are {steps} steps of scores and "
            f"{sequences.shape[1]} columns of sequences"
        )
    beams = jnp.where(has_token, beam_indices, 0)[:, :length]
    tokens = sequences[:, sequences.shape[1] - length :]
    # JAX would take an index beyond an axis for its last one.
    for name, indices, limit in (("beam_indices", beams, rows), ("sequences", tokens, vocabulary)):
        if not is_traced(indices) and ((indices < 0) | (indices >= limit)).any():
            raise InputError(
                f"{name}: expected numbers below {limit}, which scores have, found "
                f"{int(indices.min())} to {int(indices.max())}"
            )
    token_scores = stacked[jnp.arange(length), beams, tokens]
    return jnp.where(has_token[:, :length], token_scores, 0.0)


def _array(name: str, values: Any, dtype: Any, ndim: int) -> Array:
    """`values` as an array with `ndim` axes; an array for each step if there are three."""
    try:
        array = jnp.stack([jnp.asarray(x) for x in values]) if ndim == 3 else jnp.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = jnp.zeros(0)
    if array.ndim != ndim or not jnp.issubdtype(array.dtype, dtype):
        raise InputError(
            f"{name}: expected an array of {ndim} axes of {dtype.__name__} numbers, found "
            f"{quoted(values)}"
        )
    return array
