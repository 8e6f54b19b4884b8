"""Fields that constrain what is chosen, through generate(): prefixes and watermarks."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_runs import cases, model, problems, run
from generation_tools import compilations, prompts

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.generation import WatermarkDetector, WatermarkingConfig


def rule_of(case):
    rule = case["prefix_rule"]
    a, b, c, d, m, allowed = (rule[name] for name in ("a", "b", "c", "d", "m", "S"))
    vocabulary = np.arange(model(case["model"]).config.vocab_size)

    def allowed_tokens(batch_id, ids):
        value = a * vocabulary + b * int(ids[-1]) + c * batch_id + d * len(ids)
        return vocabulary[np.isin(value % m, allowed)].tolist()

    return allowed_tokens


@pytest.mark.parametrize("name", ["s-proc-prefix-allowed", "s-beam-prefix-allowed"])
def test_conformance(name):
    case = cases()[name]
    out = run(case, prefix_allowed_tokens_fn=rule_of(case), output_scores=True)
    assert problems(case, out) == []


@pytest.mark.ci
def test_an_error_of_the_callers_function_is_that_error():
    def allowed_tokens(batch_id, ids):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        jaxllm.generate(model("s_llama"), [[5]], prefix_allowed_tokens_fn=allowed_tokens)
    with pytest.raises(InputError, match="no token for prompt 0"):
        jaxllm.generate(model("s_llama"), [[5]], prefix_allowed_tokens_fn=lambda *_: [])


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [WatermarkingConfig(bias=4.0), {"ngram_len": 3, "keys": [3, 7, 11]}],
    ids=["green lists", "synthid"],
)
@pytest.mark.parametrize("name", ["s_llama", pytest.param("s_t5", marks=pytest.mark.slow)])
def test_a_watermark_changes_the_text(name, config):
    _, ids, mask = prompts(name)
    fields = {"max_new_tokens": 24, "do_sample": True, "key": 0, "eos_token_id": None}
    plain = jaxllm.generate(model(name), ids, mask, **fields).sequences
    marked = jaxllm.generate(model(name), ids, mask, watermarking_config=config, **fields).sequences
    assert (plain != marked).any()


@pytest.mark.slow
def test_a_watermark_is_detected_and_its_bias_compiles_nothing():
    net = model("s_llama")
    _, ids, mask = prompts("s_llama")
    fields = {"max_new_tokens": 60, "do_sample": True, "key": 0, "eos_token_id": None, "top_k": 0}

    def call(bias):
        return jaxllm.generate(
            net, ids, mask, watermarking_config={"bias": bias}, **fields
        ).sequences[:, 7:]

    marked = call(6.0)
    assert compilations(lambda: call(5.0)) == []
    plain = jaxllm.generate(net, ids, mask, **fields).sequences[:, 7:]
    detector = WatermarkDetector(net.config, WatermarkingConfig(bias=6.0))
    assert detector(marked).all()
    assert not detector(plain).any()


def test_an_unknown_setting_of_a_watermark_is_named():
    with pytest.raises(InputError, match="greenlist"):
        jaxllm.generate(model("s_llama"), [[5]], watermarking_config={"greenlist": 0.5})


@pytest.mark.ci
def test_groups_ask_for_the_right_prompt():
    net = model("s_llama")
    _, ids, mask = prompts("s_llama", (4, 4))
    out = jaxllm.generate(
        net,
        ids,
        mask,
        num_beams=4,
        num_beam_groups=2,
        diversity_penalty=1.0,
        num_return_sequences=4,
        max_new_tokens=5,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda batch_id, _: range(10 + 40 * batch_id, 30 + 40 * batch_id),
    ).sequences[:, 4:]
    assert ((out[:4] >= 10) & (out[:4] < 30)).all()
    assert ((out[4:] >= 50) & (out[4:] < 70)).all()
