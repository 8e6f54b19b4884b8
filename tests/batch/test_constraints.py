"""Schemas, regular expressions and grammars of rows and of jobs."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import tiny
from conformance_runs import DATA
from serving_tools import chat_tokenizer

import jaxllm
from jaxllm.batch.constraints import constraint_source
from jaxllm.common.errors import InputError
from jaxllm.generation.processors.grammar import json_schema

TOKENIZER = chat_tokenizer()
MODEL = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.mark.ci
def test_rows_match_their_own_or_the_jobs_constraint():
    engine = jaxllm.BatchGenerator(MODEL, TOKENIZER, slots=4, max_new_tokens=40, schema=SCHEMA)
    rows = [
        "Hi",
        {"prompt": "Hello there", "do_sample": True, "num_return_sequences": 3},
        {"prompt": "x", "regex": "[0-9]{3}"},
        {"prompt": "x", "grammar": 'start: "a" | "bb"'},
        {"prompt": "x", "regex": "("},
        {"prompt": "x", "regex": "a", "schema": True},
        {"prompt": "x", "schema": 5},
        {"prompt": "x", "eos_token_id": None},
    ]
    outputs = engine.generate(rows)
    for output in outputs[:2]:
        for text, reason in zip(output.texts, output.finish_reasons, strict=True):
            jsonschema.validate(json.loads(text), SCHEMA)
            assert reason == "eos"
    assert re.fullmatch("[0-9]{3}", outputs[2].text)
    assert outputs[3].text in ("a", "bb")
    for output, why in zip(
        outputs[4:],
        (
            "invalid regex",
            "schema and regex: give only one",
            "schema: expected a JSON schema",
            "eos",
        ),
        strict=True,
    ):
        assert why in output.error
    one = jaxllm.generate(
        MODEL,
        [TOKENIZER.encode("Hi")],
        logits_processor=[json_schema(SCHEMA, TOKENIZER)],
        max_new_tokens=40,
    )
    assert outputs[0].text == TOKENIZER.decode(
        one.sequences[0, len(TOKENIZER.encode("Hi")) :], skip_special_tokens=True
    )


def test_a_grammar_that_fails_while_it_runs_is_an_error_of_its_row_alone():
    """The vocabulary has no brace, which the first pattern asks for after one token."""
    model, tokenizer = jaxllm.load(DATA / "models" / "s_llama_tok")
    rows = [{"prompt": "x", "regex": " ?(a|b)\\{"}, {"prompt": "x", "regex": " ?aaa"}]
    failed, other = jaxllm.BatchGenerator(model, tokenizer, slots=4, max_new_tokens=8).generate(
        rows
    )
    assert "the tokenizer has no tokens for '{'" in failed.error
    assert other.text.strip() == "aaa"


@pytest.mark.parametrize("regex_first", [True, False])
def test_a_constrained_row_beside_a_row_of_equal_settings(regex_first):
    rows = [{"prompt": "x", "regex": "[0-9]{3}"}, {"prompt": "Hello"}]
    engine = jaxllm.BatchGenerator(MODEL, TOKENIZER, slots=2, max_new_tokens=8)
    outputs = engine.generate(rows if regex_first else rows[::-1])
    constrained, free = outputs if regex_first else outputs[::-1]
    assert re.fullmatch("[0-9]{3}", constrained.text)
    (alone,) = engine.generate(["Hello"])
    assert free.output_ids == alone.output_ids


def test_a_jobs_constraint_is_compiled_at_once():
    with pytest.raises(InputError, match="regex: "):
        jaxllm.BatchGenerator(MODEL, TOKENIZER, regex="(")
    with pytest.raises(InputError, match="schema and grammar: give only one"):
        jaxllm.BatchGenerator(MODEL, TOKENIZER, schema={}, grammar="x")


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_match_a_constraint(num_beams):
    groups = {"num_beam_groups": 2, "diversity_penalty": 0.5} if num_beams == 4 else {}
    engine = jaxllm.BatchGenerator(MODEL, TOKENIZER, slots=4, max_new_tokens=40, schema=SCHEMA)
    (output,) = engine.generate([{"prompt": "x", "num_beams": num_beams, **groups}])
    jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.mark.ci
def test_texts_of_prompts(capsys):
    prompts = ["Hi", [{"role": "user", "content": "Hello"}], {"prompt": "x", "max_new_tokens": 2}]
    jaxllm.set_progress(True, least_seconds=0)
    texts = jaxllm.generate_texts(MODEL, prompts, TOKENIZER, max_new_tokens=5, slots=4)
    jaxllm.set_progress(False)
    assert "generating, rows: 3: " in capsys.readouterr().err
    rows = ["Hi", {"messages": prompts[1]}, prompts[2]]
    engine = jaxllm.BatchGenerator(MODEL, TOKENIZER, max_new_tokens=5, slots=4)
    assert texts == [output.text for output in engine.generate(rows)]
    beams = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3, "slots": 4}
    assert [len(each) for each in jaxllm.generate_texts(MODEL, ["a"], TOKENIZER, **beams)] == [2]
    with pytest.raises(InputError, match=r"prompts\[1\]: .*prompt: expected a string"):
        jaxllm.generate_texts(MODEL, ["a", {"prompt": 5}], TOKENIZER)
    with pytest.raises(InputError, match="expected a list of prompts, found a "):
        jaxllm.generate_texts(MODEL, "a", TOKENIZER)


def test_constraints_in_files(tmp_path):
    """As on the command line, a schema may be a dict, JSON text or a file."""
    (tmp_path / "s.json").write_text('{"type": "boolean"}')
    for source in ({"type": "boolean"}, '{"type": "boolean"}', tmp_path / "s.json"):
        assert constraint_source("schema", source, "schema") == {"type": "boolean"}
    with pytest.raises(InputError, match=r"'none\.json' is neither a JSON object nor"):
        constraint_source("schema", "none.json", "schema")
    assert constraint_source("regex", "s.json", "regex") == "s.json"
