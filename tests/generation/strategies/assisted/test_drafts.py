"""Drafts: accepted whole, their schedule and threshold, prompt lookup, early exit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import DATA, model
from generation_tools import drafts, repeating_prompts

import jaxllm
from jaxllm.common.errors import NonFiniteError, UnsupportedError
from jaxllm.generation.strategies.drafts import draft_from, earlier_match


@pytest.mark.ci
@pytest.mark.parametrize(("name", "kind"), [("s_llama", 0), ("s_llama", 1), ("s_t5", 0)])
def test_a_draft_that_is_the_model_is_accepted_whole(name, kind):
    """So every round gives 5 tokens, and the assistant's cache has to catch up each time."""
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 16, "eos_token_id": None}
    expected = jaxllm.generate(model(name), ids, mask, **fields).sequences
    fields |= {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    draft = ({"assistant_model": model(name)}, {"assistant_early_exit": model(name).depth})[kind]
    out = jaxllm.generate(model(name), ids, mask, **fields, **draft)
    np.testing.assert_array_equal(out.sequences, expected)
    assert out.assisted.target_calls.tolist() == [1 + 3] * 3
    assert out.assisted.drafted.tolist() == out.assisted.accepted.tolist() == [12] * 3


@pytest.mark.ci
def test_the_schedule_and_the_threshold():
    """Accepted whole: 2, 4, 6, 8 (the bucket's end). Below a threshold of 1 every token ends."""
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 28, "eos_token_id": None, "assistant_model": model("s_llama")}
    fields |= {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.0}

    def counts(**changes):
        return jaxllm.generate(model("s_llama"), ids, mask, **{**fields, **changes}).assisted

    for schedule in ("heuristic", "heuristic_transient"):
        grown = counts(num_assistant_tokens_schedule=schedule)
        assert grown.target_calls.tolist() == [1 + 5] * 3  # 1 + 3 + 5 + 7 + 9 + 3
        assert grown.num_assistant_tokens.tolist() == [8] * 3
        assert grown.drafted.tolist() == [2 + 4 + 6 + 8 + 2] * 3
    one_each = counts(assistant_confidence_threshold=1.0, num_assistant_tokens=8)
    # The prompt's pass has no draft, nor has a last one for a single token.
    assert np.isin(one_each.target_calls - one_each.drafted, [1, 2]).all()
    assert one_each.num_assistant_tokens.tolist() == [8] * 3
    shrunk = counts(
        num_assistant_tokens_schedule="heuristic", assistant_model=model("s_llama_draft")
    )
    assert (shrunk.num_assistant_tokens < 8).any()


def test_early_exit_shares_the_parameters():
    net = model("s_llama")
    part = net.early_exit(1)
    assert part.backbone.stack.blocks[0] is net.backbone.stack.blocks[0]
    assert len(part.backbone.stack.blocks) == 1 < len(net.backbone.stack.blocks)


@pytest.mark.ci
def test_lookup_finds_what_the_plain_search_finds():
    rng = np.random.default_rng(2)
    rows, width, size, most = 300, 16, 5, 4
    text, lengths = rng.integers(0, size, (rows, width)), rng.integers(1, width + 1, rows)
    allowed, limit = rng.random((rows, size)) < 0.8, rng.integers(1, most + 1, rows)

    def search(tokens: list[int], longest: int, allowed, limit: int) -> list[int]:
        for n in range(min(longest, len(tokens) - 1), 0, -1):
            for i in range(len(tokens) - n):
                if tokens[i : i + n] == tokens[-n:] and allowed[tokens[i + n]]:
                    actual = tokens[i + n : i + n + limit]
                    return actual[: actual.index(4)] if 4 in actual else actual
        return []

    @jax.jit
    def find(text, lengths, allowed, limit, longest):
        index, actual = earlier_match(text, lengths[:, None], allowed, longest)
        limit = jnp.where(actual, limit, 0)
        return draft_from(text, lengths[:, None], index, limit, jnp.array([[4, -1]]), most)

    for longest in (1, 2, 4):
        drafted = find(text, lengths, allowed, limit, longest)
        for row in range(rows):
            expected = search(text[row, : lengths[row]].tolist(), longest, allowed[row], limit[row])
            result = drafted.tokens[row, : drafted.size[row]].tolist()
            assert result == expected


@pytest.mark.ci
def test_lookup_passes_over_places_that_the_processors_forbid():
    """The first place where the last token was may not be followed, as in transformers 5."""
    fields = {"prompt_lookup_num_tokens": 1, "suppress_tokens": [8], "eos_token_id": None}

    def says_7_then_9(input_ids, scores, cur_len):
        token = jnp.where(jnp.reshape(cur_len, (-1, 1)) == 5, 7, 9)
        return jnp.where(jnp.arange(scores.shape[1]) == token, 1e4, scores)

    fields |= {"logits_processor": [says_7_then_9], "max_new_tokens": 3}
    out = jaxllm.generate(model("s_llama"), [[7, 8, 7, 9, 4]], **fields)
    assert out.sequences[0, 5:].tolist() == [7, 9, 9]
    assert out.assisted.accepted.tolist() == out.assisted.drafted.tolist() == [1]


@pytest.mark.slow
def test_embedded_prompts():
    """A lookup then sees the new tokens, and early exit reads what the model reads."""
    net, rng = model("s_llama"), np.random.default_rng(0)
    embeds = np.asarray(net.backbone.embed.weight[...])[rng.integers(3, 99, (2, 5))]
    mask = np.array([[1] * 5, [0, 0, 1, 1, 1]])
    fields = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None}
    expected = jaxllm.generate(net, inputs_embeds=embeds, **fields).sequences
    for kind in ("early exit", "lookup"):
        actual = jaxllm.generate(net, inputs_embeds=embeds, **fields, **drafts("s_llama")[kind])
        np.testing.assert_array_equal(actual.sequences, expected)
    with pytest.raises(UnsupportedError, match="assistant_model: needs a prompt of input_ids"):
        jaxllm.generate(net, inputs_embeds=embeds, **fields, **drafts("s_llama")["assistant"])


@pytest.mark.slow
def test_non_finite_logits():
    """Those of the model are reported at their place; those of a draft only end it."""
    broken = jaxllm.load(DATA / "models" / "s_llama")[0]
    fields = {"max_new_tokens": 6, "eos_token_id": None, "num_assistant_tokens": 4}
    free = jaxllm.generate(broken, [[5, 6, 7]], max_new_tokens=6, eos_token_id=None).sequences
    table = np.array(broken.backbone.embed.weight[...])
    table[free[0, 5]] = np.nan
    broken.backbone.embed.weight[...] = jnp.asarray(table)
    with pytest.raises(NonFiniteError, match=r"new token 3 of row 0"):  # as without a draft
        jaxllm.generate(broken, [[5, 6, 7]], assistant_model=model("s_llama"), **fields)
    out = jaxllm.generate(model("s_llama"), [[5, 6, 7]], assistant_model=broken, **fields)
    np.testing.assert_array_equal(out.sequences, free)
    assert out.assisted.target_calls[0] > 2
