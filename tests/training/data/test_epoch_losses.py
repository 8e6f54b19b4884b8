"""From rows to the loss of real models: packed, in buckets, or in one length, it is the same."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from paths import DATA

import jaxllm
from jaxllm.training.data import DataConfig, ModelInfo, epoch_batches
from jaxllm.training.losses import LossSums, loss_for


class SmallBytes:
    """Bytes of "a" to "z" as the ids 2 to 27, for models of few tokens; 1 ends."""

    eos_token_id, bos_token_id = 1, None

    def encode(self, text: str, **options) -> list[int]:
        return [ord(letter) - ord("a") + 2 for letter in text if letter.islower()]

    encode_beginning = encode

    def for_targets(self) -> SmallBytes:
        return self


def rows(count: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(5)

    def word(most: int) -> str:
        return "".join(chr(97 + n) for n in rng.integers(0, 26, rng.integers(1, most)))

    return [{"a": word(12), "b": word(8), "label": n % 3} for n in range(count)]


def sums(model, config: DataConfig, batch_size: int) -> tuple[float, float, float]:
    loss, total = jax.jit(loss_for(model)), LossSums.zero()
    batches = epoch_batches(
        config,
        SmallBytes(),  # type: ignore[arg-type]
        model=ModelInfo.of(model),
        batch_size=batch_size,
        rows=rows(14),
    )
    for batch in batches:
        total = total + loss(model, batch)
    assert total.count == batches.examples.counts.learnt
    return float(total.loss), float(total.count), float(total.correct)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_gpt2", "s_llama", "s_t5"])
def test_packed_and_padded_losses_are_equal(name, highest_precision):
    model, _ = jaxllm.load(DATA / "conformance" / "models" / name)
    fields = {"format": "prompt_completion", "prompt_field": "a", "completion_field": "b"}
    if name == "s_t5":
        fields = {"format": "seq2seq", "source_field": "a", "target_field": "b"}
    config = DataConfig(**fields, max_length=32)
    expected = sums(model, dataclasses.replace(config, bucket=None), 14)
    for other in ({"packing": True}, {"bucket": 16}):
        actual = sums(model, dataclasses.replace(config, **other), 4)
        np.testing.assert_allclose(actual, expected, rtol=2e-5)


@pytest.mark.ci
def test_a_classifier_counts_every_row_once(highest_precision):
    model, _ = jaxllm.load(DATA / "parity" / "llama_cls_single")
    config = DataConfig(format="classification", text_field="a", max_length=32)
    actual, expected = sums(model, config, 8), sums(model, config, 14)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
