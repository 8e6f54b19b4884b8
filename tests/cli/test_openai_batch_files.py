"""OpenAI batch files: requests in, lines of OpenAI's format out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
from openai.types import Completion
from openai.types.chat import ChatCompletion
from serving_tools import CHAT_TEMPLATE, chat_tokenizer
from small_tokenizers import DATA
from test_batch_command import in_process, read_lines

import jaxllm
from jaxllm.batch.tables import read_source
from jaxllm.common.errors import DataError, InputError
from jaxllm.serve.http.batch_requests import BatchRequests

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22, 333]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-chat"
    vocab_size = len(chat_tokenizer())
    tiny.make("llama", num_hidden_layers=1, vocab_size=vocab_size).save_pretrained(folder)
    shutil.copy(DATA / "llama.model", folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def request(custom_id: str, url: str = CHAT, method: str = "POST", **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": f"Hi {custom_id}"}]}
    if url == TEXT:
        content = {"prompt": f"Hi {custom_id}"}
    body = {"model": "gpt-4o-mini", "max_tokens": 6, **content, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


BAD = [
    (request("unknown", temprature=1), 400, "temprature: unknown; is it temperature?"),
    (request("stream", stream=True), 400, "stream: a batch has no streams"),
    (request("long", TEXT, prompt=[5] * 500), 400, "prompt: has 500 tokens"),
    (
        request("image", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        400,
        "text",
    ),
    (request("get", method="GET"), None, "method: expected 'POST', found 'GET'"),
    (request("url", url="/v1/embeddings"), None, "url: expected '/v1/chat/completions'"),
    ({"method": "POST", "url": TEXT, "body": {}}, None, "custom_id: missing"),
    ({**request("key"), "id": "x"}, None, "id: unknown"),
    ("{", None, "not JSON"),
]


def all_requests(count: int) -> list[Any]:
    """So many requests: chats and texts of all settings, and then those of `BAD`."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 7, "top_p": 0.9},
        {"n": 2, "temperature": 1.5},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "e"]},
    ]
    requests = []
    for i in range(count - len(BAD)):
        url, body = (CHAT, TEXT)[i % 2], options[i % len(options)]
        if url == TEXT and "top_logprobs" in body:
            body = {"logprobs": 2}
        requests.append(request(f"r{i}", url, **body))
    requests[20] |= request("schema", response_format=FORMAT, max_tokens=20)
    return [*requests, *(line for line, _, _ in BAD)]


def write(path: Path, lines: list[Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.mark.ci
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_requests_of_all_kinds(tmp_path, capsys, chat_model, count):
    requests = all_requests(count)
    source = write(tmp_path / "requests.jsonl", requests)
    files = ("--input", source, "--output", tmp_path / "out.jsonl")
    flags = ("--slots", 8, "--context", 64)
    code, err = in_process(capsys, "--model", chat_model, *files, *flags)
    assert code == 0, err
    assert "its requests name gpt-4o-mini; --model answers them" in err
    lines = read_lines(tmp_path / "out.jsonl")
    assert len(lines) == len(requests)
    good = len(requests) - len(BAD)
    for expected, line in zip(requests[:good], lines, strict=False):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert (line["custom_id"], line["error"]) == (expected["custom_id"], None)
        response, body = line["response"], expected["body"]
        assert response.keys() == {"status_code", "request_id", "body"}
        assert response["status_code"] == 200, response
        of_kind: Any = ChatCompletion if expected["url"] == CHAT else Completion
        answer = of_kind.model_validate(response["body"], strict=True)
        assert answer.model == "tiny-chat"
        assert len(answer.choices) == body.get("n", 1)
        assert 0 < answer.usage.completion_tokens <= body["max_tokens"] * body.get("n", 1)
        if body.get("logprobs") is True:
            assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    schema = json.loads(lines[20]["response"]["body"]["choices"][0]["message"]["content"])
    jsonschema.validate(schema, SCHEMA)
    for (_, status, why), line in zip(BAD, lines[good:], strict=True):
        if status is None:
            assert line["response"] is None
            message = line["error"]["message"]
            assert why in message
            if line["custom_id"] is None:
                assert message.startswith(f"line {lines.index(line) + 1}: ")
        else:
            assert line["error"] is None
            assert line["response"]["status_code"] == status
            assert why in line["response"]["body"]["error"]["message"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["rows"], sum(report["errors"].values())) == (len(requests), len(BAD))
    tokens = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines[:good])
    assert report["new_lengths"]["total"] == tokens


def content(output: Any) -> Any:
    return output.line["response"]["body"]["choices"]


@pytest.mark.ci
def test_answers_do_not_depend_on_the_other_requests(tmp_path, chat_model):
    """A seed follows from the job's and the number of the request, so a resumed job goes on."""
    model, tokenizer = jaxllm.load(chat_model)
    source = read_source(write(tmp_path / "requests.jsonl", [request(f"r{i}") for i in range(12)]))

    def answers(rows: list[int], **options: Any) -> dict[int, Any]:
        engine = BatchRequests(model, tokenizer, model_name="m", slots=8, context=64, **options)
        return {o.index: content(o) for o in engine.answer(map(source.row, rows))}

    full = answers(list(range(12)))
    assert answers([3, 9]) == {3: full[3], 9: full[9]}
    assert answers([3], seed=1) != {3: full[3]}
    greedy = answers([3, 4], do_sample=False)
    expected = jaxllm.generate(
        model, [tokenizer.apply_chat_template(source.row(3).raw["body"]["messages"])],
        do_sample=False, max_new_tokens=6,
    )  # fmt: skip
    text = greedy[3][0]["message"]["content"]
    assert text == tokenizer.decode(expected.sequences[0, -6:], skip_special_tokens=True)


@pytest.mark.ci
def test_what_is_refused(tmp_path, capsys, chat_model):
    path = write(tmp_path / "requests.jsonl", [request("a"), request("a")])
    with pytest.raises(DataError, match="lines 1 and 2 have the same id, 'a'"):
        read_source(path).check_rows()
    write(path, [request("a")])
    for flags, why in (
        (("--chat",), "--chat: remove it"),
        (("--prompt-column", "x"), "--prompt-column: .* is an OpenAI batch file"),
        (("--num-return-sequences", 2, "--do-sample"), "requests of a batch file have `n`"),
    ):
        files = ("--input", path, "--output", tmp_path / "out.jsonl")
        code, err = in_process(capsys, "--model", chat_model, *files, *flags)
        assert code == 2
        assert why.split(".*")[-1].strip() in err
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl")
    assert (
        "--context is only for OpenAI batch files" in in_process(capsys, *files, "--context", 64)[1]
    )
    write(path, [request("a", stream=True)])
    files = ("--input", path, "--output", tmp_path / "out.jsonl")
    code, err = in_process(capsys, "--model", chat_model, *files, "--slots", 8, "--context", 64)
    assert (code, "no row succeeded" in err) == (1, True)
    with pytest.raises(InputError, match="seed: expected"):
        BatchRequests(*jaxllm.load(chat_model), model_name="m", seed=-1)
