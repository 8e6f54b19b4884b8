"""Early ends of a sequence in generate(): stops, clocks, streamers; token healing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import DATA, cases, model, problems, run
from generation_tools import FAMILIES, compilations, prompts

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation import EosTokenCriteria, HostCriteria, MaxTimeCriteria

TOKENIZER = jaxllm.load(DATA / "models" / "s_llama_tok")[1]


@pytest.mark.parametrize("name", ["s-stop-strings", "s-token-healing"])
def test_conformance(name):
    case = cases()[name]
    # Without scores: those of the steps after a row's end mean nothing.
    assert problems(case, run(case, tokenizer=TOKENIZER)) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"do_sample": True, "key": 3}, marks=pytest.mark.slow), {"num_beams": 3}],
)
def test_a_stop_string_ends_the_text_and_stays_in_it(fields):
    ids = [TOKENIZER.encode("the cat sat on")]
    arguments = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **fields}
    net = model("s_llama_tok")
    free = jaxllm.generate(net, ids, **arguments).sequences[0, len(ids[0]) :]
    stop = TOKENIZER.decode(free[:9])[-2:]
    out = jaxllm.generate(
        net, ids, stop_strings=[stop], tokenizer=TOKENIZER, **arguments
    ).sequences[0, len(ids[0]) :]
    text = TOKENIZER.decode(out)
    if "num_beams" in fields:  # a shorter text may win
        assert stop in text[-6:] or len(out) == 20
    else:
        np.testing.assert_array_equal(out, free[: len(out)])
        assert stop in text
        assert stop not in TOKENIZER.decode(out[:-1])


@pytest.mark.ci
def test_other_stop_strings_compile_nothing():
    def call(*strings):
        return jaxllm.generate(
            model("s_llama_tok"),
            [[5, 6]],
            stop_strings=strings,
            tokenizer=TOKENIZER,
            max_new_tokens=4,
        )

    call("ab", "c")
    assert compilations(lambda: call("xyz")) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["s_llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_criteria_of_the_caller(name):
    """A traceable function, a pytree and a host function end the same rows."""
    net = model(name)
    _, ids, mask = prompts(name)
    arguments = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    free = jaxllm.generate(net, ids, mask, **arguments).sequences
    stop = int(free[0, -9])

    def newest_is(input_ids, scores, cur_len):
        return input_ids[:, cur_len - 1] == stop

    runs = [
        jaxllm.generate(net, ids, mask, stopping_criteria=[criterion], **arguments).sequences
        for criterion in (
            newest_is,
            EosTokenCriteria(stop),
            HostCriteria(lambda ids, scores: ids[:, -1] == stop),
        )
    ]
    arguments["eos_token_id"] = stop
    runs.append(jaxllm.generate(net, ids, mask, **arguments).sequences)
    for other in runs[1:]:
        np.testing.assert_array_equal(other, runs[0])
    assert runs[0].shape[1] <= free.shape[1]


@pytest.mark.ci
@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}])
def test_max_time_ends_rows_after_the_current_token(fields):
    ids = [[5, 6, 7]]
    arguments = {"max_new_tokens": 64, "eos_token_id": None, "pad_token_id": 0, **fields}
    out = jaxllm.generate(model("s_llama"), ids, max_time=1e-6, **arguments)
    assert out.sequences.shape[1] == 4
    late = MaxTimeCriteria(1e9, initial_timestamp=-2e9)
    again = jaxllm.generate(model("s_llama"), ids, stopping_criteria=[late], **arguments)
    np.testing.assert_array_equal(again.sequences, out.sequences)
    free = jaxllm.generate(model("s_llama"), ids, max_time=1e6, **arguments).sequences
    assert free.shape[1] == 67


@pytest.mark.ci
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_time_limit_ends_beams_as_a_criterion_does(step, early_stopping, monkeypatch):
    """At the step after which the time is over, with the sequences and scores of that step."""
    ids = np.array([[5, 6, 7], [8, 9, 3]])
    fields = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "pad_token_id": 0}
    fields |= {"early_stopping": early_stopping, "length_penalty": 0.5, "eos_token_id": [4, 11]}
    net, calls = model("s_llama"), []

    def expired(self):
        calls.append(0)
        return len(calls) >= step

    with monkeypatch.context() as patched:
        patched.setattr(MaxTimeCriteria, "expired", expired)
        out = jaxllm.generate(net, ids, max_time=1.0, **fields)
    limit = HostCriteria(lambda ids, scores: np.full(len(ids), ids.shape[1] >= 3 + step))
    expected = jaxllm.generate(net, ids, stopping_criteria=[limit], **fields)
    np.testing.assert_array_equal(out.sequences, expected.sequences)
    np.testing.assert_allclose(out.sequences_scores, expected.sequences_scores, rtol=1e-6)
    assert out.finish_reason_names() == expected.finish_reason_names()


class Streamer:
    def __init__(self):
        self.calls, self.ended = [], False

    def put(self, ids):
        self.calls.append(ids)

    def end(self):
        self.ended = True


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[:2]), *FAMILIES[2:]]
)
def test_a_streamer_gets_the_prompt_and_every_token(name):
    _, ids, mask = prompts(name)
    fields = {"max_new_tokens": 7, "do_sample": True, "key": 1, "eos_token_id": None}
    streamer = Streamer()
    out = jaxllm.generate(model(name), ids, mask, streamer=streamer, **fields).sequences
    assert streamer.ended
    first, *rest = streamer.calls
    np.testing.assert_array_equal(first, out[:, :-7])
    np.testing.assert_array_equal(np.stack(rest, axis=1), out[:, -7:])


@pytest.mark.ci
@pytest.mark.parametrize("watch", [{"streamer": Streamer()}, {"max_time": 1e6}])
def test_scores_are_fetched_from_the_device_at_the_end_alone(watch, monkeypatch):
    _, ids, mask = prompts("s_llama")
    fetched, fetch = [], jax.device_get

    def counted(tree):
        size = sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
        if size:  # the prompt that a streamer gets first is on the host already
            fetched.append(size)
        return fetch(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    fields = {"max_new_tokens": 7, "eos_token_id": None, "output_scores": True}
    out = jaxllm.generate(model("s_llama"), ids, mask, **watch, **fields)
    *each, last = fetched
    assert len(each) == 7
    # As many bytes as the sequences have, and a little more.
    assert max(each) < 1000 < sum(x.nbytes for x in out.scores) <= last
    assert isinstance(out.scores[0], np.ndarray)


def test_what_cannot_be_is_named():
    net = model("s_llama")
    for error, match, fields in (
        (InputError, "tokenizer", {"stop_strings": "a"}),
        (InputError, "tokenizer", {"token_healing": True}),
        (InputError, "stopping_criteria", {"stopping_criteria": len}),
        (UnsupportedError, "streamer", {"streamer": Streamer(), "num_beams": 2}),
        (
            UnsupportedError,
            "max_time",
            {"max_time": 1.0, "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
        ),
    ):
        with pytest.raises(error, match=match):
            jaxllm.generate(net, [[5]], **fields)
    with pytest.raises(UnsupportedError, match="token_healing"):
        jaxllm.generate(model("s_t5"), [[5]], token_healing=True, tokenizer=TOKENIZER)
    under_jit = jax.jit(lambda ids: jaxllm.generate(net, ids, max_time=1.0).sequences)
    with pytest.raises(InputError, match="max_time"):
        under_jit(jnp.array([[5]]))


@pytest.mark.ci
def test_max_time_keeps_the_tokens_of_faster_rows():
    """Drafts are accepted row by row; the time is up before every row has as much."""
    net = model("s_llama")
    _, ids, mask = prompts("s_llama")
    fields = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    fields |= {"assistant_model": net, "num_assistant_tokens": 4}
    out = jaxllm.generate(net, ids, mask, max_time=1e-6, **fields)
    full = jaxllm.generate(net, ids, mask, **fields)
    width = out.sequences.shape[1]
    same = (out.sequences == full.sequences[:, :width]) | (out.sequences == 0)
    assert same.all()
    assert (out.sequences[:, -1] != 0).any()


@pytest.mark.ci
def test_an_error_of_a_host_function_is_that_error():
    def criterion(ids, scores):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        jaxllm.generate(model("s_llama"), [[5]], stopping_criteria=[HostCriteria(criterion)])


@pytest.mark.ci
def test_healing_says_what_it_does_not_go_with():
    net, ids = model("s_llama_tok"), [[5, 6]]
    fields = {"token_healing": True, "tokenizer": TOKENIZER}
    with pytest.raises(InputError, match="token_healing"):
        jax.jit(lambda ids: jaxllm.generate(net, ids, **fields).sequences)(jnp.array(ids))
    with pytest.raises(InputError, match="inputs_embeds"):
        jaxllm.generate(net, ids, inputs_embeds=np.zeros((1, 2, 32)), **fields)
