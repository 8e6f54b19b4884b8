"""Templates over columns, columns that are copied to the output, and misspelt ones."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from recorded_job import RecordedEngine, run

from jaxllm.batch.job.job import Job
from jaxllm.batch.tables import ColumnChoice, Source, read_source
from jaxllm.batch.tables.templates import RowTemplate
from jaxllm.common.errors import DataError, InputError, JaxLLMError

CSV = (
    "\ufeffid,question,asked by,price,question,lang\r\n"
    'a,"Why, ""exactly""?\nTell me.",Ann,1.50,twice,\r\n'
    "\r\n"
    "b,なぜ,,2.00,,ja\r\n"
)


def source_of(folder: Path, name: str, content: str, **choice: Any) -> Source:
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return read_source(folder / name, ColumnChoice(**choice))


def template(text: str) -> RowTemplate:
    return RowTemplate(text, "--template")


def prompts(source: Source) -> list[Any]:
    return [source.row(index).raw for index in range(len(source))]


def test_a_template_reads_columns_by_name(tmp_path):
    text = "{{ id }}|{{ row['asked by'] }}|{{ price }}|{{ lang or 'en' }}|{{ row['question.1'] }}"
    rows = prompts(source_of(tmp_path, "rows.csv", CSV, template=template(text)))
    assert [row["prompt"] for row in rows] == ["a|Ann|1.50|en|twice", "b||2.00|ja|"]
    assert [row["id"] for row in rows] == ["a", "b"]


def test_system_templates_make_chats(tmp_path):
    choice = {"template": template("{{ price }}"), "system_template": template("In {{ lang }}")}
    second = prompts(source_of(tmp_path, "rows.csv", CSV, **choice))[1]
    assert second["messages"] == [
        {"role": "system", "content": "In ja"},
        {"role": "user", "content": "2.00"},
    ]
    assert "prompt" not in second


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ Price }}", "no column 'Price'; the nearest is 'price'; there are id, question"),
        ("{{ row['askedby'] }}", "no column 'askedby'; the nearest is 'asked by'"),
        ("{{ row.langs }}", "no column 'langs'; the nearest is 'lang'"),
        ("{{ question }}", "the column 'question' is there twice"),
    ],
)
def test_columns_that_the_table_lacks(tmp_path, text, why):
    with pytest.raises(DataError, match=why):
        source_of(tmp_path, "rows.csv", CSV, template=template(text))


@pytest.mark.parametrize(
    "text",
    [
        "{{ note | default('none') }}|{{ id }}",
        "{% if note is defined %}{{ note }}{% else %}none{% endif %}|{{ id }}",
        "{{ row['note'] | default('none') }}|{{ id }}",
        "{{ row.get('note', 'none') }}|{{ id }}",
        "{% for name in row if name == 'id' %}none|{{ row[name] }}{% endfor %}",
    ],
)
def test_columns_that_may_be_missing(tmp_path, text):
    rows = prompts(source_of(tmp_path, "rows.csv", CSV, template=template(text)))
    assert [row["prompt"] for row in rows] == ["none|a", "none|b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ id", "wrong in line 1"),
        ("{{ id }}\n{% if %}", "wrong in line 2"),
        ("Hello", "names no column"),
        ("prompt.jinja", "names no column.*or name a file"),
        ("{{ range(3) }}", "names no column"),
    ],
)
def test_templates_that_are_refused(text, why):
    with pytest.raises(InputError, match=f"--template: .*{why}"):
        template(text)


def test_a_row_for_which_a_template_fails_is_an_error(tmp_path):
    lines = [{"id": 1, "a": "x"}, {"id": 2, "b": "y"}, {"id": 3, "a": 7}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    source = source_of(tmp_path, "rows.jsonl", content, template=template("{{ a + 'z' }}"))
    first, second, third = (source.row(index) for index in range(3))
    assert first.raw == {"id": 1, "prompt": "xz"}
    assert isinstance(second.raw, JaxLLMError)
    assert "'a' is undefined" in str(second.raw)
    assert (second.row_id, third.row_id) == (2, 3)
    assert "unsupported operand" in str(third.raw)


def test_a_template_reaches_nothing_but_its_row(tmp_path):
    source = source_of(tmp_path, "rows.csv", CSV, template=template("{{ id.__class__.__mro__ }}"))
    assert "unsafe" in str(source.row(0).raw)


def job(folder: Path, source: Source, output: str) -> Job:
    engine: Any = RecordedEngine()
    return Job(engine, source, folder / output, {"--model": "m"})


def test_kept_columns_of_csv_are_equal_to_the_byte(tmp_path):
    choice = {"template": template("{{ price }}"), "keep": "all"}
    source = source_of(tmp_path, "rows.csv", CSV, **choice)
    written = run(job(tmp_path, source, "out.csv")).decode()
    first, *rows = csv.reader(written.splitlines(keepends=True))
    kept = ["question", "asked by", "price", "question.1", "lang"]
    assert first == ["id", "row", *kept, "text", "output_ids", "finish_reason", *ERRORS]
    assert [row[:7] for row in rows] == [
        ["a", "0", 'Why, "exactly"?\nTell me.', "Ann", "1.50", "twice", ""],
        ["b", "1", "なぜ", "", "2.00", "", "ja"],
    ]


ERRORS = ["error", "error_kind"]


def test_kept_columns_of_parquet_keep_their_types(tmp_path):
    day = datetime.date(2026, 11, 25)
    table = pyarrow.table(
        {
            "prompt": ["x", "y"],
            "day": pyarrow.array([day, None]),
            "half": pyarrow.array([0.5, 1.5], pyarrow.float32()),
            "who": [{"name": "Ann", "age": None}, {"name": "Bo", "age": 5}],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    source = read_source(tmp_path / "rows.parquet", ColumnChoice(keep=("who", "day", "half")))
    run(job(tmp_path, source, "out.parquet"))
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.column_names[:5] == ["id", "row", "day", "half", "who"]
    for name in ("day", "half", "who"):
        assert written.column(name).equals(table.column(name))
        assert written.schema.field(name).type == table.schema.field(name).type
    assert written.schema.field("error").type == pyarrow.string()
    lines = [json.loads(line) for line in run(job(tmp_path, source, "out.jsonl")).splitlines()]
    assert lines[0]["day"] == "2026-11-25"


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"keep": ("text",)}, "has a column 'text' of its own; put a prefix"),
        ({"keep": "all"}, "has a column 'text' of its own"),
        ({"keep": ("lang",), "keep_prefix": "r"}, None),
        ({"keep": ("txt",)}, "--keep: no column 'txt'; the nearest is 'text'"),
        ({"keep": "all", "keep_prefix": "in_"}, None),
    ],
)
def test_names_of_kept_columns(tmp_path, choice, why):
    content = "prompt,text,lang\nx,y,en\n"
    if why is None:
        source = source_of(tmp_path, "rows.csv", content, **choice)
        kept = [f"{choice['keep_prefix']}{name}" for name in ("prompt", "text", "lang")]
        kept = kept if choice["keep"] == "all" else kept[2:]
        assert source.columns[2:-5] == kept
        return
    with pytest.raises((DataError, InputError), match=why):
        source_of(tmp_path, "rows.csv", content, **choice)


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_other_columns_are_named_once_and_misspelt_ones_are_errors(tmp_path, name):
    def content(column: str) -> str:
        if name.endswith("csv"):
            return f"prompt,{column}\nx,1\n"
        return json.dumps({"prompt": "x", column: 1}) + "\n"

    source = source_of(tmp_path, name, content("topic"))
    assert source.row(0).raw == {"prompt": "x"}
    assert source.remarks() == [f"{tmp_path / name}: these columns are not read: topic"]
    for wrong in ("temprature", "max_new_token", "max-new-tokens", "Temperature"):
        with pytest.raises(DataError, match="is nearly the generation field"):
            source_of(tmp_path, name, content(wrong))
    assert source_of(tmp_path, name, content("temprature"), keep=("temprature",)).unread == []


def test_templates_and_named_columns_exclude_each_other():
    with pytest.raises(InputError, match="--template cannot be combined with --prompt-column"):
        ColumnChoice(prompt="a", template=template("{{ a }}"))
    with pytest.raises(InputError, match="--keep-prefix has no effect without --keep"):
        ColumnChoice(keep_prefix="a")


@pytest.mark.parametrize("text", ["{{ q|nofilter }}", "{{ q is nope }}", "{{ q", "", "{{ 1 }}"])
def test_wrong_templates(text):
    with pytest.raises(InputError, match=r"^--template: "):
        template(text)


def test_columns_called_as_functions_of_jinja(tmp_path):
    content = "id,q,range,dict\n1,a,short,x\n"
    text = "{{ q }} {{ range }} {{ row['dict'] }}"
    source = source_of(tmp_path, "rows.csv", content, template=template(text))
    assert prompts(source)[0]["prompt"] == "a short x"
    assert source.remarks() == []
    text = "{{ q }}{% for i in range(2) %}!{% endfor %}"
    source = source_of(tmp_path, "rows.csv", "id,q\n1,a\n", template=template(text))
    assert prompts(source)[0]["prompt"] == "a!!"


def test_columns_of_templates_are_no_settings(tmp_path):
    """A `schema` or a `temperature` that a template names is data; a remark says so."""
    content = "q,temperature,max_new_tokens\nHow,21.5,3\n"
    text = "{{ q }} at {{ temperature }}"
    source = source_of(tmp_path, "rows.csv", content, template=template(text))
    assert prompts(source) == [{"prompt": "How at 21.5", "max_new_tokens": 3}]
    (remark,) = source.remarks()
    assert remark.endswith("are read by templates, not as settings: temperature")


def test_system_messages_before_messages(tmp_path):
    """A system template adds to messages; it does not replace them."""
    choice = {"system_template": template("In {{ lang }}")}
    user = {"role": "user", "content": "Hi"}
    lines = [{"lang": "ja", "messages": [user]}, {"lang": "ja", "prompt": ""}]
    lines.append({"lang": "ja", "messages": [{"role": "system", "content": "No"}, user]})
    content = "".join(json.dumps(line) + "\n" for line in lines)
    rows = prompts(source_of(tmp_path, "rows.jsonl", content, **choice))
    assert rows[0]["messages"] == [{"role": "system", "content": "In ja"}, user]
    assert "no prompt, or an empty one" in str(rows[1])
    assert "have a system message" in str(rows[2])


def test_numbers_that_json_lacks(tmp_path):
    """Integers with gaps stay integers in prompts; NaN is no value."""
    columns = {"q": ["a", "b"], "year": [1889.0, None], "price": [float("nan"), 1.5]}
    pq.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    choice = ColumnChoice(template=template("{{ q }} {{ year }} {{ price }}"), keep="all")
    source = read_source(tmp_path / "rows.parquet", choice)
    assert [row["prompt"] for row in prompts(source)] == ["a 1889 ", "b  1.5"]
    assert source.kept(0) == {"q": "a", "year": 1889, "price": None}
    assert source.arrow()["year"].type == pyarrow.float64()


def test_repeated_columns(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["q", "q"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="the column 'q' is there twice"):
        read_source(tmp_path / "rows.parquet", ColumnChoice(prompt="q"))


def test_ids_that_look_alike(tmp_path):
    """A row without an id has its number; the output cannot tell 2 from "2"."""
    source = source_of(tmp_path, "rows.csv", "id,prompt\n,a\n2,b\n")
    with pytest.raises(DataError, match="have the same id"):
        source.check_rows()


def test_a_template_that_fails_for_every_row(tmp_path):
    choice = {"template": template("{{ q.missing.name }}")}
    with pytest.raises(DataError, match=r"correct --template$"):
        source_of(tmp_path, "rows.csv", "id,q\n1,a\n", **choice).check_rows()
