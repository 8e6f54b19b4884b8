"""Texts that a model should write are targets of the tokenizer, in a language that is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from translation_tools import TARGETS, write_model

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.row_tasks import RowScorer
from jaxllm.batch.rows import RawRow
from jaxllm.cli.main import main
from jaxllm.common.errors import InputError

LANGUAGES = [name for name in TARGETS if name not in ("marian", "t5")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loads a family's tiny model, once."""
    models = {}

    def load(name):
        if name not in models:
            models[name] = jaxllm.load(write_model(tmp_path_factory.mktemp(name), name))
        return models[name]

    return load


def answers(engine, rows):
    raw_rows = [RawRow(index, index, row) for index, row in enumerate(rows)]
    return sorted(engine.answer(raw_rows), key=lambda output: output.index)


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize("name", list(TARGETS))
def test_scores_of_target_texts_are_those_of_transformers(loaded, name):
    model, tokenizer = loaded(name)
    stored = TARGETS[name]["rows"]
    rows = [without(row, "ids", "token_log_probs") for row in stored]
    for row, output in zip(stored, answers(RowScorer(model, tokenizer), rows), strict=True):
        assert output.error is None
        np.testing.assert_allclose(
            output.token_log_probs, row["token_log_probs"], rtol=1e-5, atol=2e-4
        )
    languages = {key: stored[0].get(key) for key in ("src_lang", "tgt_lang")}
    texts = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    scores = jaxllm.score(model, *texts, tokenizer.with_languages(**languages))
    expected = [sum(row["token_log_probs"]) for row in stored]
    np.testing.assert_allclose(scores.log_likelihoods, expected, rtol=1e-5)


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_missing_language_is_an_error(loaded, name):
    model, tokenizer = loaded(name)
    row = without(TARGETS[name]["rows"][0], "ids", "token_log_probs")
    bare = without(row, "tgt_lang")
    message = "tgt_lang: this translation model needs the language of the new text"
    with pytest.raises(InputError, match=message):
        jaxllm.score(model, [row["prompt"]], [row["completion"]], tokenizer)
    with pytest.raises(InputError, match=message):
        jaxllm.generate_texts(model, [row["prompt"]], tokenizer, max_new_tokens=3)
    scored = [bare, {**bare, "completion": [4, 5]}, {**row, "completion": [4, 5]}, row]
    outputs = answers(RowScorer(model, tokenizer), scored)
    assert outputs[0].error.startswith(message)
    assert outputs[1].error is outputs[3].error is None
    assert "tgt_lang: has no effect on a completion of token ids" in outputs[2].error
    # Ids are never asked.
    (output,) = BatchGenerator(model, tokenizer, max_new_tokens=3).generate([[4, 5]])
    assert output.error is None
    # The model's settings, the tokenizer, the call and the row name it.
    fields, languages = (
        tokenizer.target_fields(row["tgt_lang"]),
        without(row, "prompt", "completion"),
    )
    prompt = without(bare, "completion")
    own = model.with_card(generation_config=model.generation_config.replace(**fields))
    with_language = tokenizer.with_languages(tgt_lang=row["tgt_lang"])
    results = [
        jaxllm.generate_texts(*call, max_new_tokens=3, **options)
        for call, options in (
            ((model, [{**prompt, **fields}], tokenizer), {}),
            ((model, [without(row, "completion")], tokenizer), {}),
            ((own, [prompt], tokenizer), {}),
            ((model, [prompt], with_language), {}),
            ((model, [row["prompt"]], tokenizer), languages),
        )
    ]
    assert results[1:] == results[:1] * 4


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command on rows of JSONL with NLLB; gives the exit code and the lines."""
    folder = tmp_path_factory.mktemp("command")
    write_model(folder / "nllb", "nllb")

    def run(rows, *options, noisy=False):
        lines, output = [json.dumps(row) for row in rows], folder / f"{len(list(folder.iterdir()))}"
        (folder / "rows.jsonl").write_text("\n".join(lines))
        files = ("--input", folder / "rows.jsonl", "--output", f"{output}.jsonl")
        fixed = ("--model", folder / "nllb", *files, "--no-compile-cache")
        fixed += () if noisy else ("--quiet",)
        code = main(["generate", *map(str, (*fixed, *options))])
        written = Path(f"{output}.jsonl")
        return code, [json.loads(x) for x in written.read_text().splitlines() if written.exists()]

    return run


NLLB = TARGETS["nllb"]["rows"]


def test_the_command_has_languages_for_a_whole_file(loaded, command):
    model, tokenizer = loaded("nllb")
    languages = ("--src-lang", "deu_Latn", "--tgt-lang", "zul_Latn")
    rows = [{"prompt": "Hello world."}, {"prompt": "Hello world.", "tgt_lang": "fra_Latn"}]
    code, lines = command(rows, *languages, "--max-new-tokens", 4)
    named = [{"src_lang": "deu_Latn", "tgt_lang": "zul_Latn", **row} for row in rows]
    expected = jaxllm.generate_texts(model, named, tokenizer, max_new_tokens=4)
    assert (code, [line["text"] for line in lines]) == (0, expected)
    assert expected[0] != expected[1]
    scored = [without(row, "src_lang", "tgt_lang", "ids", "token_log_probs") for row in NLLB]
    code, lines = command(scored, *languages, "--score")
    for line, row in zip(lines, NLLB, strict=True):
        assert line["log_likelihood"] == pytest.approx(sum(row["token_log_probs"]), rel=1e-5)


def test_a_job_without_a_language_ends_before_its_first_row(command, capsys):
    row = {"prompt": "Hello world.", "completion": "Hello"}
    for options in (("--score",), ("--max-new-tokens", 4)):
        with pytest.raises(FileNotFoundError):
            command([row], *options)
        assert "tgt_lang: this translation model needs the language" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        command([row], "--tgt-lang", "zul_Latn", "--forced-bos-token-id", 3)
    assert "forced_bos_token_id: 3 contradicts tgt_lang" in capsys.readouterr().err
    code, lines = command([row, {**row, "tgt_lang": "zul_Latn"}], "--max-new-tokens", 4)
    assert (code, ["error" in line for line in lines]) == (0, [True, False])


BLANK = ["Hello world.", "", "Nice to meet you.", "   "]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "python", "frame"])
@pytest.mark.parametrize("name", ["nllb", "marian"])
def test_a_line_without_text_is_translated_as_an_empty_line(loaded, tmp_path, kind, name):
    model, tokenizer = loaded(name)
    prefix = ">>deu<< " if name == "marian" else ""
    lines = [prefix + text for text in BLANK] if kind == "python" else BLANK
    options = {} if name == "marian" else {"tgt_lang": "zul_Latn"}
    engine = BatchGenerator(model, tokenizer, max_new_tokens=4, **options)
    alone = engine.generate([lines[0], lines[2]])
    expected = [alone[0].text, "", alone[1].text, ""]
    if kind == "python":
        outputs = engine.generate(lines)
        assert [output.text for output in outputs] == expected
        assert outputs[1].to_dict() == {
            "id": 1,
            "text": "",
            "output_ids": [],
            "finish_reason": "eos",
        }
        assert (engine.counts.rows, engine.counts.errors.total()) == (4, 0)
        several = engine.generate([{"prompt": "", "num_return_sequences": 2, "do_sample": True}])
        assert several[0].texts == ("", "")
        return
    table = pa.table({"prompt": [*lines[:3], None if kind in ("frame", "parquet") else "  "]})
    if kind == "frame":
        assert engine.generate_table(table).column("text").to_pylist() == expected
        return
    path, output = tmp_path / f"in.{kind}", tmp_path / "out.jsonl"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        path.write_text("prompt,n\n" + "".join(f"{line},1\n" for line in lines))
    else:
        path.write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    engine.generate_table(path, output=output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["text"] for row in rows] == expected


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_an_error_where_nothing_is_translated(loaded, text):
    model, tokenizer = loaded("nllb")
    t5, t5_tokenizer = loaded("t5")
    rows = [{"prompt": "Hello", "completion": text}, {"prompt": text, "completion": "Hello"}]
    rows = [{**row, "tgt_lang": "zul_Latn"} for row in rows]
    for output, field in zip(answers(RowScorer(model, tokenizer), rows), rows, strict=True):
        name = next(key for key in field if field[key] == text)
        assert output.error.startswith(f"{name}: ")
    (output,) = BatchGenerator(t5, t5_tokenizer).generate([{"prompt": text}])
    assert output.error.startswith(f"prompt: has no text, found {text!r}")
    spoken = tokenizer.with_languages(tgt_lang="zul_Latn")
    calls = {
        r"completions\[0\]": lambda: jaxllm.score(model, ["Hello"], [text], spoken),
        r"texts\[1\]: prompt": lambda: jaxllm.embed(t5, ["Hello", text], t5_tokenizer),
        r"inputs\[1\]": lambda: jaxllm.pipeline("translation", model, tokenizer)(
            ["Hello", text], tgt_lang="zul_Latn"
        ),
        "inputs": lambda: jaxllm.pipeline("text2text-generation", t5, t5_tokenizer)(text),
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=f"{message}.*: has no text"):
            call()


def test_a_language_alone_is_no_text(loaded):
    model, tokenizer = loaded("marian")
    text = ">>deu<< "
    calls = {
        r"inputs\[0\]": lambda: jaxllm.pipeline("translation", model, tokenizer)(text),
        r"prompts\[0\]": lambda: jaxllm.score(model, [text], ["Hello"], tokenizer),
        r"texts\[0\]: prompt": lambda: jaxllm.embed(model, [text], tokenizer),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=f"{name}: has no text, found '>>deu<< '"):
            call()
    (output,) = answers(RowScorer(model, tokenizer), [{"prompt": text, "completion": "Hello"}])
    assert output.error.startswith("prompt: has no text")
    assert jaxllm.generate_texts(model, [text], tokenizer) == [""]


def test_the_language_of_a_score_is_an_argument(loaded):
    model, tokenizer = loaded("nllb")
    texts, languages = (["Hello"], ["Hello"]), {"src_lang": "deu_Latn", "tgt_lang": "zul_Latn"}
    spoken = tokenizer.with_languages(**languages)
    expected = jaxllm.score(model, *texts, spoken).log_likelihoods
    found = jaxllm.score(model, *texts, tokenizer, **languages).log_likelihoods
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(InputError, match="tgt_lang: 'x' is no language"):
        jaxllm.score(model, *texts, tokenizer, tgt_lang="x")
    with pytest.raises(InputError, match="src_lang, tgt_lang: have no effect on token ids"):
        jaxllm.score(model, [[4]], [[5]], tgt_lang="zul_Latn")


def test_a_named_language_wins_over_the_one_that_a_file_of_mbart_forces(loaded):
    model, tokenizer = loaded("mbart")
    forced = model.generation_config.replace(forced_bos_token_id=tokenizer.get_lang_id("fr_XX"))
    options = {"max_new_tokens": 4, "tgt_lang": "de_DE"}
    expected, found = (
        jaxllm.generate_texts(each, ["Hello"], tokenizer, **options)
        for each in (model, model.with_card(generation_config=forced))
    )
    assert found == expected
    row = {"prompt": "Hello", "forced_bos_token_id": forced.forced_bos_token_id}
    (output,) = BatchGenerator(model, tokenizer, **options).generate([row])
    assert output.output_ids[0][0] == forced.forced_bos_token_id


LONG = " ".join(["Hello world."] * 30)


@pytest.mark.parametrize("options", [{"truncation": True}, {"max_source_length": 9}])
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_long_texts_are_cut_and_counted(loaded, command, name, options):
    model, tokenizer = loaded(name)
    if name == "t5":  # computes its positions, so that the limit is the tokenizer's
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = 64
    limit = options.get("max_source_length", 64)
    ids = tokenizer.encode(LONG, truncation=True, max_length=limit)
    assert (len(ids), ids[-1]) == (limit, tokenizer.eos_token_id)
    engine = BatchGenerator(model, tokenizer, max_new_tokens=4, **options)
    short, cut, same = engine.generate(["Hello", LONG, {"input_ids": ids}])
    assert cut.output_ids == same.output_ids
    assert short.prompt_tokens < cut.prompt_tokens == limit
    assert engine.counts.cut_texts == 1
    task = "translation" if name == "marian" else "text2text-generation"
    pipe = jaxllm.pipeline(task, model, tokenizer, max_new_tokens=4)
    (answer,) = pipe(LONG, **options)
    assert [*answer.values()] == [cut.text]


def test_a_long_text_is_named_and_the_advice_can_be_followed(loaded):
    model, tokenizer = loaded("marian")  # whose positions are learned
    with pytest.raises(InputError, match=r"inputs\[1\]: needs \d+ positions, but the model has 64"):
        jaxllm.pipeline("translation", model, tokenizer)(["Hello", LONG])
    with pytest.raises(InputError, match="truncation: the model has no longest text"):
        jaxllm.pipeline("text2text-generation", *loaded("t5"))(LONG, truncation=True)
    both = {"truncation": "yes", "max_source_length": 9}
    for wrong in ({"truncation": "yes"}, {"max_source_length": 0}, both):
        with pytest.raises(InputError, match=max(wrong)):
            BatchGenerator(model, tokenizer, **wrong)
    (output,) = BatchGenerator(model, tokenizer).generate([LONG])
    assert "cut it with truncation" in output.error
    assert "max_position_embeddings" not in output.error


def test_computed_positions_go_on_in_batches_as_in_generate(loaded):
    model, tokenizer = loaded("nllb")
    ids = tokenizer.encode(LONG)
    assert len(ids) > model.config.context_length == 64
    engine = BatchGenerator(model, tokenizer, max_new_tokens=4, tgt_lang="zul_Latn")
    (output,) = engine.generate([LONG])
    fields = tokenizer.target_fields("zul_Latn")
    alone = jaxllm.generate(model, [ids], max_new_tokens=4, **fields)
    assert list(output.output_ids[0]) == alone.new_tokens(1)[0]
    assert BatchGenerator(model, tokenizer).plan([RawRow(0, 0, [4])]).rows[0].max_length <= 64


def test_the_command_cuts_long_texts(command, capsys):
    rows = [{"prompt": LONG, "completion": "a"}, {"prompt": "Hello", "completion": "a"}]
    options = ("--tgt-lang", "zul_Latn")
    for cut in (("--truncation",), ("--max-source-length", 9)):
        code, lines = command(rows, *options, *cut, "--max-new-tokens", 4, noisy=True)
        assert (code, len(lines)) == (0, 2)
        assert "1 texts, which were too long" in capsys.readouterr().err
        with pytest.raises(FileNotFoundError):
            command(rows, *options, *cut, "--score")
        assert f"{cut[0]}: is only for rows that generate from texts" in capsys.readouterr().err
