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
from jaxllm.batch.tables.columns import RowTemplate
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


JINJA_NAMES = "row items keys values get copy pop range dict cycler namespace loop self joiner"


@pytest.mark.parametrize("name", [*JINJA_NAMES.split(), "lipsum", "raise_exception", "update"])
def test_a_column_comes_before_what_jinja_has_by_its_name(tmp_path, name):
    content = f"id,q,{name}\n1,a,cell\n"
    text = f"{{{{ {name} }}}}|{{{{ row.{name} }}}}|{{{{ row['{name}'] }}}}|{{{{ row['q'] }}}}"
    text += "{% for x in [1, 2] %}|{{ NAME }}{{ loop.index }}{% endfor %}".replace("NAME", name)
    source = source_of(tmp_path, "rows.csv", content, template=template(text))
    assert prompts(source)[0]["prompt"] == "cell|cell|cell|a|cell1|cell2"
    calls = "{% for k, v in row.items() %}{{ k }}={{ v }} {% endfor %}{{ row.get('q') }}"
    calls += "{% for i in range(2) %}{{ i }}{% endfor %}"
    source = source_of(tmp_path, "rows.csv", content, template=template(calls))
    assert prompts(source)[0]["prompt"] == f"id=1 q=a {name}=cell a01"


def test_names_that_a_template_sets_itself(tmp_path):
    text = (
        "{% set items = 'own' %}{{ items }}{% for row in [{'name': q}] %} {{ row.name }}"
        "{% set outer = loop %}{% for x in 'ab' %} {{ outer.index }}{{ loop.index }}{% endfor %}"
        "{% endfor %}{% macro range(x) %}<{{ x }}>{% endmacro %} {{ range(q) }}"
    )
    for content in ("id,q,items,range\n1,a,b,c\n", "id,q\n1,a\n"):
        source = source_of(tmp_path, "rows.csv", content, template=template(text))
        assert prompts(source)[0]["prompt"] == "own a 11 12 <a>"


def test_keys_of_cells_come_before_methods(tmp_path):
    """Also in the cell of a column that is called row, as every output of a job has one."""
    content = json.dumps({"row": {"a": 1, "get": 2}, "order": {"items": ["x", "y"], "copy": 5}})
    text = "{{ row.a }} {{ row['get'] }} {{ order.items | join }} {{ order.copy }}"
    text += " {{ order.keys() | list }}"
    source = source_of(tmp_path, "rows.jsonl", content, template=template(text))
    assert prompts(source)[0]["prompt"] == "1 2 xy 5 ['items', 'copy']"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ q.upper }}", "'upper' is a method"),
        ("{{ q ~ q.upper }}", "'upper' is a method"),
        ("{{ [q.upper] }}", "'upper' is a method"),
        ("{% if q.upper %}{{ q }}{% endif %}", "'upper' is a method"),
        ("{{ q | attr('upper') }}", "'upper' is a method"),
        ("{{ q }}{% macro m() %}x{% endmacro %}{{ m }}", "is a function"),
        ("{{ q }}{% for x in [1] %}{% set o = loop %}{{ o }}{% endfor %}", "is a function"),
    ],
)
def test_printed_methods_are_errors(tmp_path, text, why):
    source = source_of(tmp_path, "rows.csv", "id,q\n1,a\n", template=template(text))
    assert why in str(source.row(0).raw)


@pytest.mark.parametrize("text", ["row.items", "row['items']", "range", "row.get", "loop", "self"])
def test_methods_are_no_columns(tmp_path, text):
    """Of a table that has no such column."""
    with pytest.raises(DataError, match="--template: no column '"):
        source_of(tmp_path, "rows.csv", "q\na\n", template=template("{{ q }}{{ " + text + " }}"))


NUMBERS = {
    "{{ n }}": ["5", "2.5", "0", "1e+300", "inf", "", "-3"],
    "{{ n ~ ' EUR' }}": ["5 EUR", "2.5 EUR", "0 EUR", "1e+300 EUR", "inf EUR", " EUR", "-3 EUR"],
    "{{ '%s' % n }} {{ '{}'.format(n) }} {{ n | string }}": ["5 5 5", "2.5 2.5 2.5"],
    "{{ '%.2f' % n }} {{ '%.2f' | format(n) }} {{ '{:,.1f}'.format(n) }}": [
        "5.00 5.00 5.0",
        "2.50 2.50 2.5",
    ],
    "{{ n * 2 }} {{ [n, [n]] }} {{ n | tojson }}": ["10 [5, [5]] 5", "5 [2.5, [2.5]] 2.5"],
}
FLOATS = [5.0, 2.5, -0.0, 1e300, float("inf"), None, -3.0]


@pytest.mark.parametrize("text", NUMBERS)
def test_floats_in_prompts(tmp_path, text):
    """A prompt depends on its own cell: 5.0 is 5 whether the column has gaps, fractions or not."""
    for count in (1, 2, len(FLOATS)):
        columns = {"q": ["a"] * count, "n": pyarrow.array(FLOATS[:count], pyarrow.float64())}
        pq.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
        choice = ColumnChoice(template=template("{{ row['q'] }}" + text))
        source = read_source(tmp_path / "rows.parquet", choice)
        expected = NUMBERS[text][:count]
        found = [row["prompt"] for row in prompts(source)[: len(expected)]]
        assert found == [f"a{number}" for number in expected]
    lines = "".join(json.dumps({"q": "a", "n": n}) + "\n" for n in FLOATS[:4])
    choice = {"template": template("{{ row['q'] }}" + text)}
    source = source_of(tmp_path, "rows.jsonl", lines, **choice)
    found = [row["prompt"] for row in prompts(source)[: len(NUMBERS[text])]]
    assert found == [f"a{number}" for number in NUMBERS[text][:4]]


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
