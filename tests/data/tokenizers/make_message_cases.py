"""Makes message_cases.json: conversations in the formats that people have, with their right ids.

Needs transformers==4.57.6, which passes nulls on; run it in this folder. Each conversation is there
twice: as it comes (`messages`, `tools`), and written out by hand in plain form, from which
transformers makes the ids. The templates are written in the styles of published ones.
"""

import copy
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEMPLATES = {
    # Qwen and Hermes: calls as JSON, tools in the system message.
    "qwen": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<response>' + message.content + '</response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson + '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # Llama 3: one call in a message, found by its key; contents are trimmed.
    "llama": """\
{%- if tools is not defined %}{%- set tools = none %}{%- endif %}
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) }}
    {{- '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- elif message.content is mapping or message.role == 'tool' %}
        {{- message.content | tojson }}
    {%- else %}
        {%- if tools is not none and message.role == 'user' and loop.first %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
        {%- endif %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Gemma 3: takes a text or parts, and has no tools.
    "gemma": """\
{%- for message in messages -%}
    {{ '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}<image>
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""",
    # LLaVA: takes parts and nothing else.
    "llava": """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{{ content['text'] }}{% endfor %}{{ '</s>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    # Mistral: tests whether a content is none; tools stand before the last user message.
    "mistral": """\
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and tools is not none %}
            {{- '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULTS] ' + message.content + '[/RESULTS]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS] ' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
        {{- ('' if message['content'] is none else message['content']) + '</s>' }}
    {%- else %}
        {{- ' ' + message['content'] + '</s>' }}
    {%- endif %}
{%- endfor %}
""",
    # Phi 3.5: marks what the assistant says; the end of the whole is no part of a prefix.
    "phi": """\
{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}\
{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '</s>\\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}\
{% else %}{{ '<|end_of_text|>' }}{% endif %}""",
    # DeepSeek: writes arguments as the text that they are.
    "deepseek": """\
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message['content'] is none %}
        {{- '<|assistant|>' }}
        {%- for call in message['tool_calls'] %}
            {{- '<call>' + call['function']['name'] + '\\n' + call['function']['arguments'] }}
            {{- '</call>' }}
        {%- endfor %}
        {{- '</s>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message['content'] }}
        {%- if message.role == 'assistant' %}{{- '</s>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
""",
}
WITH_TOOLS = ("qwen", "llama", "mistral")
WITH_PARTS = ("gemma", "llava")
ARGUMENTS = {"city": "Bern", "unit": None}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: object, **others: object) -> dict[str, object]:
    return {"id": "c12345678", "type": "function", **others} | {
        "function": {"name": "weather", "arguments": arguments}
    }


def chat(*messages: tuple[str, object], **fields: object) -> dict[str, object]:
    return {"messages": [{"role": role, "content": said} for role, said in messages], **fields}


TURNS = chat(
    ("user", "Hi"), ("assistant", "Hello!\nYes?"), ("user", "Who < you?"), ("assistant", "I")
)
SYSTEM = chat(("system", "Be brief."), *[(m["role"], m["content"]) for m in TURNS["messages"]])
PARTS = chat(("user", parts("What ", "is it?")), ("assistant", parts("A", " bird.")))
JOINED = chat(("user", "What is it?"), ("assistant", "A bird."))
CALLS = chat(("user", "Weather?"), ("assistant", None), ("tool", "Sunny"), ("assistant", "Sun."))
CALLS["messages"][1]["tool_calls"] = [call(ARGUMENTS)]
NO_ARGUMENTS = copy.deepcopy(CALLS)
NO_ARGUMENTS["messages"][1]["tool_calls"] = [call({})]


def raw_calls(arguments: object, tools: object) -> dict[str, object]:
    """Calls as OpenAI's client writes them, with nulls and empty lists."""
    result = copy.deepcopy(CALLS)
    for message in result["messages"]:
        message["name"] = None
        message["tool_calls"] = []
    result["messages"][1]["tool_calls"] = [call(arguments, index=None)]
    return result if tools is None else {**result, "tools": tools}


def nulls(plain: dict[str, object]) -> dict[str, object]:
    messages = [{**m, "name": None, "tool_calls": [], "refusal": None} for m in plain["messages"]]
    return {"messages": messages, "tools": []}


def cases(style: str) -> list[tuple[str, dict[str, object], dict[str, object]]]:
    """Name, raw form and plain form of each conversation for a template."""
    convert = (lambda plain: plain) if style != "llava" else as_parts
    own_parts = PARTS if style in WITH_PARTS else JOINED
    result = [
        ("turns", TURNS, convert(TURNS)),
        ("parts", PARTS, own_parts),
        ("nulls", nulls(TURNS), convert(TURNS)),
        ("tools that are none", {**TURNS, "tools": " "}, convert(TURNS)),
    ]
    if style != "mistral":
        result.append(("system", SYSTEM, convert(SYSTEM)))
    if style in WITH_TOOLS:
        tools, text = [TOOL], json.dumps([TOOL], indent=2)
        plain = {**CALLS, "tools": tools}
        if style == "qwen":  # its contents are not tested for none: the key is left out
            plain = copy.deepcopy(plain)
            del plain["messages"][1]["content"]
        empty = copy.deepcopy(plain)
        empty["messages"][1]["tool_calls"] = [call({})]
        one = json.dumps(TOOL)
        result += [
            ("calls as objects", raw_calls(ARGUMENTS, tools), plain),
            ("calls as text", raw_calls(json.dumps(ARGUMENTS), text), plain),
            ("calls without arguments", raw_calls("", tools), empty),
            ("one tool as text", raw_calls(ARGUMENTS, " " + one), plain),
        ]
    if style == "deepseek":
        plain = copy.deepcopy(CALLS)
        plain["messages"][1]["tool_calls"] = [call(json.dumps(ARGUMENTS))]
        result.append(("calls as objects", raw_calls(ARGUMENTS, None), plain))
        result.append(("calls as text", raw_calls(json.dumps(ARGUMENTS), None), plain))
    return result


def as_parts(plain: dict[str, object]) -> dict[str, object]:
    return {"messages": [{**m, "content": parts(m["content"])} for m in plain["messages"]]}


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "fast" / "smollm.json"))
    result = []
    for style, template in TEMPLATES.items():
        for name, raw, plain in cases(style):
            case = {"style": style, "name": name, **raw}
            for key, count, prompt in (
                ("ids", len(plain["messages"]), False),
                ("prompt_ids", len(plain["messages"]) - 1, True),
            ):
                encoded = tokenizer.apply_chat_template(
                    plain["messages"][:count],
                    tools=plain.get("tools"),
                    chat_template=template,
                    add_generation_prompt=prompt,
                    return_dict=True,
                    return_assistant_tokens_mask=style == "phi" and not prompt,
                )
                case[key] = encoded["input_ids"]
                if style == "phi" and not prompt:
                    case["assistant_mask"] = encoded["assistant_masks"]
            result.append(case)
    content = {"templates": TEMPLATES, "cases": result}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "message_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
