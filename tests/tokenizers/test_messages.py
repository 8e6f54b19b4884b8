"""Conversations in the formats that people have: `message_cases.json` says what they mean."""

import json

import paths
import pytest

from jaxllm.common.errors import InputError
from jaxllm.tokenizers import FastTokenizer
from jaxllm.tokenizers.messages import plain_rows, read_messages, read_tools
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.template_analysis import template_reads

DATA = paths.DATA / "tokenizers"
CONTENT = json.loads((DATA / "message_cases.json").read_text(encoding="utf-8"))
SPEC = json.loads((DATA / "fast" / "smollm.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "a"}
PARTS_OF_USER = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}|{% elif m.content is string "
    "%}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}+{% endfor %}{% endif %}"
    "{% endfor %}"
)


def tokenizer_of(style: str) -> FastTokenizer:
    templates = {"default": CONTENT["templates"][style]}
    return FastTokenizer(SPEC, TokenizerSettings(chat_templates=templates))


def name_of(case: dict) -> str:
    return f"{case['style']}: {case['name']}"


def text_of(template: str, *messages: dict, **options) -> str:
    tokenizer = tokenizer_of("qwen")
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=False, **options
    )


@pytest.mark.parametrize("case", CONTENT["cases"], ids=name_of)
def test_ids_are_those_of_the_plain_form(case):
    tokenizer, tools = tokenizer_of(case["style"]), case.get("tools")
    for key, messages in (("ids", case["messages"]), ("prompt_ids", case["messages"][:-1])):
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=key == "prompt_ids"
        )
        assert ids == case[key]
    read = read_messages(case["messages"])
    assert read_messages(read) == read == read_messages(json.dumps(case["messages"]))


@pytest.mark.parametrize("case", [c for c in CONTENT["cases"] if c["style"] == "phi"], ids=name_of)
def test_marked_tokens_are_those_of_transformers(case):
    mask = [0] * len(case["ids"])
    for start, stop in tokenizer_of("phi").marked_tokens(case["messages"]):
        mask[start:stop] = [1] * (stop - start)
    assert mask == case["assistant_mask"]


def test_parts_that_a_template_would_lose():
    """Templates loop over the parts of the user, and write a system message as it is."""
    system = {"role": "system", "content": [{"type": "text", "text": "Be"}]}
    user = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    assert text_of(PARTS_OF_USER, user) == "a+b+"
    assert text_of(PARTS_OF_USER, system, user) == "Be|a+b+"
    first = "{{ messages[0].content[0].text }}{% if messages[0].content is string %}!{% endif %}"
    assert template_reads(first).parts
    assert text_of("{{ messages[0].content if messages[0].content is string else "
                   "messages[0].content[0].text }}", user) == "ab"  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'none' if messages[0].content is none else 'text' }}", "none"),
        ("{{ 'none' if messages[0].content == none else 'text' }}", "none"),
        ("{{ 'key' if 'content' in messages[0] else 'no key' }}", "no key"),
        ("{{ messages[0].content + '!' }}", "!"),  # fails if there is no such key
        ("{% set c = messages[0].content %}{% if c is not none %}{{ c | length }}{% endif %}", ""),
    ],
)  # fmt: skip
def test_null_content(template, expected):
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert text_of("{# tool_calls #}" + template, message) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% set c = messages[0].content %}{% for p in c %}{% endfor %}", (True, False)),
        ("{% macro f(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}"
         "{{ f(messages[0]['content']) }}", (True, False)),
        ("{% macro f(x) %}{% if x is string %}{{ x }}{% endif %}{% for p in x %}{% endfor %}"
         "{% endmacro %}{{ f(messages[0]['content']) }}", (True, True)),
        ("{% set ns = namespace(c='') %}{% set ns.c = messages[0].content %}"
         "{% for p in ns.c %}{{ p.text }}{% endfor %}", (True, False)),
        ("{{ messages[0].content | map(attribute='text') | join }}", (True, False)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (False, True)),
        ("{% for line in messages[0].content.split('x') %}{{ line }}{% endfor %}", (False, True)),
        ("{% for content in messages[0].other %}{{ content }}{% endfor %}"
         "{{ messages[0].content }}", (False, True)),
        ("{{ messages | tojson }}", (False, True)),
        ("{{ (messages[0].content | first).text }}", (True, False)),
        ("{{ messages[0].content[-1].text }}", (True, False)),
        ("{% for p in messages[0].content[1:] %}{{ p.text }}{% endfor %}", (True, False)),
        ("{% for p in messages[0].content | reverse %}{% endfor %}", (True, False)),
        ("{% with c = messages[0].content %}{% for p in c %}{% endfor %}{% endwith %}",
         (True, False)),
        ("{% macro f(x=messages[0].content) %}{% for p in x %}{% endfor %}{% endmacro %}{{ f() }}",
         (True, False)),
    ],
)  # fmt: skip
def test_what_templates_read(template, expected):
    reads = template_reads(template)
    assert (reads.parts, reads.text) == expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": 7}, r"messages\[1\].content: expected a text or .*, found 7"),
        ({"role": "user", "content": {"text": "a"}}, r"messages\[1\].content: expected a text or"),
        ({"role": "user"}, r"messages\[1\].content: is missing or null"),
        ({"role": "user", "content": None}, r"messages\[1\].content: is missing or null"),
        ({"role": "assistant", "tool_calls": []}, r"messages\[1\].content: is missing or null"),
        ({"content": "a"}, r"messages\[1\].role: expected the name of a role"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
         r"messages\[1\].content\[1\]: expected a part of type text with its text, found"),
        ({"role": "user", "content": ["a"]}, r"messages\[1\].content\[0\]: .* found a text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"\[0\]: expected a part"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]},
         r"messages\[1\].tool_calls\[0\].function.arguments: not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
         r"messages\[1\].tool_calls\[0\].arguments: expected a JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "with the name of its function"),
        ({"role": "assistant", "tool_calls": 3}, r"tool_calls: expected a list of calls, found 3"),
        ({"role": "assistant", "content": "a", "function_call": {}}, "function_call: is the old"),
    ],
)  # fmt: skip
def test_wrong_messages(message, error):
    with pytest.raises(InputError, match=error):
        tokenizer_of("qwen").apply_chat_template([USER, message])


def test_errors_of_several_conversations_name_theirs():
    with pytest.raises(InputError, match=r"messages\[1\]\[0\].content: is missing"):
        tokenizer_of("qwen").apply_chat_template([[USER], [{"role": "user"}]])


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("clock", "tools: not JSON"),
        ("[3]", r"tools\[0\]: expected the JSON schema of a function, found 3"),
        ([None], r"tools\[0\]: expected the JSON schema of a function, found nothing"),
        (7, "tools: expected a list of JSON schemas, found 7"),
        ([print], r"tools\[0\]: expected the JSON schema"),
    ],
)
def test_wrong_tools(tools, error):
    with pytest.raises(InputError, match=error):
        tokenizer_of("qwen").apply_chat_template([USER], tools=tools)


def test_tools_and_calls_need_a_place_in_the_template():
    tokenizer = tokenizer_of("gemma")
    with pytest.raises(InputError, match="tools: the chat template has no place for them"):
        tokenizer.apply_chat_template([USER], tools=[{"name": "f"}])
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    with pytest.raises(InputError, match=r"messages\[1\].tool_calls: the chat template does not"):
        tokenizer.apply_chat_template([USER, call])
    assert [read_tools(tools) for tools in (None, [], "", " [ ] ", {}, "null")] == [None] * 6
    by_name = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }}"}
    tokenizer.chat_template = by_name
    chosen = [
        tokenizer.apply_chat_template([USER], tools=t, tokenize=False) for t in ("[]", "[{}]")
    ]
    assert chosen == ["a", "1"]


def test_calls_that_a_template_does_not_write():
    """It makes JSON of tools or contents, and never reads the calls."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    with pytest.raises(InputError, match=r"messages\[0\].tool_calls: the chat template does not"):
        text_of(template, call, tools=[{"name": "f"}])
    assert '"f"' in text_of("{% for m in messages %}{{ m | tojson }}{% endfor %}", call)


def test_arguments_are_never_written_as_python_shows_them():
    arguments = '{"x": null, "ok": true}'
    template = "{% for c in messages[0].tool_calls %}{{ c.arguments }}{% endfor %}"
    for given in (arguments, json.loads(arguments)):
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]}
        assert text_of(template, call) == arguments


def test_weights_are_for_training_alone():
    message = {"role": "assistant", "content": "a", "weight": 0}
    assert "weight" not in text_of("{{ messages | tojson }}", message)


def test_nulls_with_a_meaning_stay_unless_they_come_from_arrow():
    """In arguments and schemas; Arrow gives each struct the keys of all structs of its column."""
    datasets = pytest.importorskip("datasets")
    arguments = [{"city": "Bern", "unit": None}, {"city": None, "unit": "C"}]
    chats = [
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": a}]},
        ]
        for a in arguments
    ]
    template = "{# tool_calls #}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    written = [text_of(template, *chat) for chat in chats]
    assert '"unit": null' in written[0]
    assert '"city": null' in written[1]
    data = datasets.Dataset.from_dict({"messages": chats})
    cleaned = [text_of(template, *chat) for chat in plain_rows(data["messages"])]
    assert [text.count("null") for text in cleaned] == [0, 0]
    assert [
        text.replace(', "unit": null', "").replace('"city": null, ', "") for text in written
    ] == (cleaned)
    tokenizer = tokenizer_of("qwen")
    assert tokenizer.apply_chat_template(data["messages"], chat_template=template) == [
        tokenizer.apply_chat_template(chat, chat_template=template)
        for chat in plain_rows(data["messages"])
    ]
