"""docs/extending.md runs as it stands: a processor and a strategy of one's own."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import tiny
from paths import ROOT

import jaxllm
from jaxllm.batch import BatchGenerator  # before the examples register their fields
from jaxllm.batch.row_groups import groups
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.common.errors import UnsupportedError
from jaxllm.generation import GenerationConfig
from jaxllm.generation.processors.build import REGISTERED
from jaxllm.generation.processors.penalties import RepetitionPenaltyLogitsProcessor
from jaxllm.generation.registration import (
    REGISTERED_STRATEGIES,
    Condition,
    Field,
    Sample,
    declare_field,
    number,
    register_processor,
    register_prompt_transform,
    register_strategy,
)
from jaxllm.generation.settings import FIELDS, UnusedFieldWarning
from jaxllm.generation.settings.resolve import check_consistent

DOC = ROOT / "docs" / "extending.md"


@pytest.fixture
def unregistered():
    """Takes away what a test registers."""
    tables = [FIELDS, REGISTERED_STRATEGIES, *REGISTERED.values()]
    before = [dict(table) for table in tables]
    yield
    for name in FIELDS.keys() - before[0].keys():
        delattr(GenerationConfig, name)
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.ci
def test_examples_run(unregistered) -> None:
    text = DOC.read_text(encoding="utf-8")
    namespace = {"__name__": "extending", "model": tiny.cached("llama"), "input_ids": tiny.ids()}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(DOC), "exec"), namespace)
    results = {name: namespace[name].sequences for name in ("by_hand", "by_field")}
    np.testing.assert_array_equal(results["by_field"], results["by_hand"])
    greedy = {"max_new_tokens": 4}
    for threshold, fields in ((0.0, greedy), (1.0, namespace["sampled"])):
        expected, found = (
            jaxllm.generate(namespace["model"], namespace["input_ids"], **settings).sequences
            for settings in (fields, {**namespace["sampled"], "greedy_above": threshold})
        )
        np.testing.assert_array_equal(found, expected)
    config = GenerationConfig(top_n_sigma=2, do_sample=True)
    assert (config.top_n_sigma, config.explicit) == (2.0, {"top_n_sigma", "do_sample"})
    with pytest.raises(jaxllm.JaxLLMError, match="`top_n_sigma` must be a number"):
        GenerationConfig(top_n_sigma=0)
    generator = BatchGenerator(tiny.cached("llama"), do_sample=True, seed=0)
    settings = ({"top_n_sigma": 0.5}, {"top_n_sigma": 1e-6}, {"greedy_above": 0.0})
    rows = [{"input_ids": [3, 4, 5], "max_new_tokens": 3, **fields} for fields in settings]
    outputs = sorted(generator.generate(rows), key=lambda output: output.index)
    greedy = jaxllm.generate(tiny.cached("llama"), np.array([[3, 4, 5]]), max_new_tokens=3)
    assert outputs[1].output_ids == outputs[2].output_ids == (greedy.sequences[0, 3:].tolist(),)


def test_rows_of_one_program_may_differ_in_a_registered_field(unregistered) -> None:
    register_processor(
        "my_penalty",
        lambda value, inputs: RepetitionPenaltyLogitsProcessor(value),
        field=Field(None, number("(0, inf)"), "divides the scores of tokens so far", neutral=1.0),
    )
    model = tiny.cached("llama")
    reader = RowReader(model, None, {"max_new_tokens": 3}, seed=0)
    rows = [{"input_ids": [3, 4], "my_penalty": 2.0}, {"input_ids": [5], "my_penalty": 0.5}, [6]]
    checked = [reader.read(RawRow(i, i, row)) for i, row in enumerate(rows)]
    [group] = groups(checked, model.config.vocab_size)
    assert group.shared_fields == ("my_penalty",)


@pytest.mark.ci
def test_settings_that_do_not_go_with_an_extension(unregistered) -> None:
    model, ids = tiny.cached("llama"), tiny.ids()
    positive = number("(0, inf)")
    declare_field("first", Field(None, positive, "selects a strategy"))
    declare_field("second", Field(None, positive, "an option of it", needs="first"))
    register_strategy(
        "first come", lambda call: call.config.first is not None, lambda call: Sample(False)
    )
    with pytest.raises(UnsupportedError, match=r"first come: takes the place of .*beam_search"):
        jaxllm.generate(model, ids, first=1.0, num_beams=2)
    with pytest.warns(UnusedFieldWarning, match="`second`=1.0 has no effect without `first`"):
        jaxllm.generate(model, ids, second=1.0, max_new_tokens=1)
    jaxllm.generate(model, ids, first=1.0, second=1.0, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"'third'\): unknown field 'a watch' in needs="):
        declare_field("third", Field(None, positive, "an option", needs="a watch"))
    watch = Condition("a watch", lambda config, assistant: config.max_time is not None)
    declare_field("third", Field(None, positive, "an option", needs=watch))
    with pytest.warns(UnusedFieldWarning, match="`third`=1.0 has no effect without `a watch`"):
        check_consistent(GenerationConfig(third=1.0))
    with warnings.catch_warnings(action="error"):
        check_consistent(GenerationConfig(third=1.0, max_time=1.0))


def test_registration_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no field 'no_such'"):
        register_processor("no_such", lambda value, inputs: None)
    with pytest.raises(ValueError, match="no field 'no_such'"):
        register_prompt_transform("no_such", lambda *arguments: arguments[2:])
    for name in ("temperature", "streamer", "merge"):
        with pytest.raises(ValueError, match=f"'{name}' is taken"):
            declare_field(name, Field(None, float, "anything"))


def test_watermark_names_are_in_generation() -> None:
    from jaxllm import generation

    assert generation.WatermarkDetector.__module__ == "jaxllm.contrib.watermark.green_list"
    assert "WatermarkingConfig" in dir(generation)
    assert all(hasattr(generation, name) for name in generation.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        generation.Nothing  # noqa: B018
