"""Every entrance that takes messages gives a model the ids that the conversation means.

The conversations and their ids are those of `message_cases.json`; the entrances are listed from the
package itself, so that a new one has to be added here.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import small_tokenizers
import tiny
from serving_tools import running_server

import jaxllm
from jaxllm import pipeline_tasks
from jaxllm.batch.rows import PromptReader
from jaxllm.cli import generate as generate_command
from jaxllm.cli.main import COMMANDS
from jaxllm.serve.http.answers import Answer
from jaxllm.serve.http.app import make_app
from jaxllm.tokenizers import FastTokenizer
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.training.data import DataConfig, ModelInfo, make_batches
from jaxllm.training.evaluation import generation_rows

CONTENT = json.loads((small_tokenizers.DATA / "message_cases.json").read_text(encoding="utf-8"))
SPEC = json.loads((small_tokenizers.DATA / "fast" / "smollm.json").read_text(encoding="utf-8"))
STYLES = tuple(CONTENT["templates"])
LIMITS = {"max_new_tokens": 1, "slots": 4}


@dataclasses.dataclass
class Setting:
    """A model with a chat template, and what reached the model so far."""

    style: str
    tokenizer: FastTokenizer
    model: Any
    folder: Path
    is_arrow: bool = False
    seen: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def cases(self) -> list[dict[str, Any]]:
        cases = [case for case in CONTENT["cases"] if case["style"] == self.style]
        return [case for case in cases if not self.is_arrow or fits_columns(case)]

    def rows(self, *, prompts: bool = True) -> list[dict[str, Any]]:
        """The conversations as rows: without their last answer, or whole."""
        return [
            {
                "messages": case["messages"][:-1] if prompts else case["messages"],
                **({"tools": case["tools"]} if "tools" in case else {}),
            }
            for case in self.cases
        ]

    def expected(self, key: str = "prompt_ids") -> list[list[int]]:
        return [case[key] for case in self.cases]

    def info(self) -> ModelInfo:
        return ModelInfo.of(self.model)


@pytest.fixture
def setting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Setting:
    template = CONTENT["templates"][request.param]
    tokenizer = FastTokenizer(SPEC, TokenizerSettings(chat_templates={"default": template}))
    model = tiny.make(
        "llama", num_hidden_layers=1, vocab_size=len(tokenizer), max_position_embeddings=512
    )
    is_arrow = "parquet" in request.node.name
    result = Setting(request.param, tokenizer, model, tmp_path / "model", is_arrow)
    read = PromptReader.ids

    def ids(self: PromptReader, *arguments: Any, **options: Any) -> Any:
        result.seen.append(read(self, *arguments, **options).tolist())
        return np.asarray(result.seen[-1], np.int32)

    monkeypatch.setattr(PromptReader, "ids", ids)
    return result


def distinct(ids: list[list[int]]) -> list[list[int]]:
    """A job reads its rows more than once."""
    return [list(each) for each in dict.fromkeys(map(tuple, ids))]


def in_python(setting: Setting) -> list[list[int]]:
    return [
        setting.tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"))
        for row in setting.rows()
    ]


def in_a_batch(setting: Setting) -> list[list[int]]:
    outputs = jaxllm.BatchGenerator(setting.model, setting.tokenizer, **LIMITS).generate(
        setting.rows()
    )
    assert [output.error for output in outputs] == [None] * len(outputs)
    return setting.seen


def in_texts(setting: Setting) -> list[list[int]]:
    jaxllm.generate_texts(setting.model, setting.rows(), setting.tokenizer, **LIMITS)
    return setting.seen


def in_vectors(setting: Setting) -> list[list[int]]:
    jaxllm.embed(setting.model, setting.rows(), setting.tokenizer)
    return setting.seen


def in_a_pipeline(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """It takes no tools: only conversations without them are compared."""
    generate = pipeline_tasks._generate

    def spy(pipe: Any, prompts: Any, *arguments: Any) -> Any:
        setting.seen.extend(map(list, prompts))
        return generate(pipe, prompts, *arguments)

    monkeypatch.setattr(pipeline_tasks, "_generate", spy)
    pipe = jaxllm.pipeline("text-generation", setting.model, setting.tokenizer)
    without = [row["messages"] for row in setting.rows() if not row.get("tools")]
    pipe(without, max_new_tokens=1)
    own = [case["prompt_ids"] for case in setting.cases if not case.get("tools")]
    assert setting.seen == own
    return setting.expected()


def in_a_job(setting: Setting, *flags: str, suffix: str = ".jsonl") -> list[list[int]]:
    jaxllm.save_hf(setting.folder, setting.model, setting.tokenizer)
    source, target = setting.folder / f"rows{suffix}", setting.folder / f"out{suffix}"
    write_rows(setting.rows(), source, scored="--score" in flags)
    settings = () if flags else ("--max-new-tokens", "1", "--slots", "4")
    arguments = ["--model", str(setting.folder), "--input", str(source), "--output", str(target)]
    assert generate_command.main([*arguments, *settings, *flags, "--quiet"], "jaxllm generate") == 0
    return setting.seen


def write_rows(rows: list[dict[str, Any]], path: Path, *, scored: bool = False) -> None:
    if scored:
        rows = [{**row, "completion": "Yes."} for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pandas = pytest.importorskip("pandas")
        for row in rows:
            if "tools" in row and not isinstance(row["tools"], str):
                row["tools"] = json.dumps(row["tools"])
        pandas.DataFrame(rows).to_parquet(path)
    else:
        pandas = pytest.importorskip("pandas")
        texts = [
            {name: x if isinstance(x, str) else json.dumps(x) for name, x in row.items()}
            for row in rows
        ]
        pandas.DataFrame(texts).to_csv(path, index=False)


def fits_columns(case: dict[str, Any]) -> bool:
    """True if a case fits a table of one type: contents and arguments are texts.

    Its structs then have all keys of the others, and null in them.
    """
    return all(
        isinstance(m.get("content") or "", str)
        and all(isinstance(c["function"]["arguments"], str) for c in m.get("tool_calls") or ())
        for m in case["messages"]
    )


def in_requests(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Both routes of a server that take messages; a batch file of requests is answered alike."""
    submit = Answer.submit

    def spy(self: Answer, prompts: Any, *arguments: Any, **options: Any) -> Any:
        setting.seen.extend(map(list, prompts))
        return submit(self, prompts, *arguments, **options)

    monkeypatch.setattr(Answer, "submit", spy)
    counted = []
    with running_server(setting.model, setting.tokenizer, embeddings=False, context=512) as server:
        setting.seen.clear()  # of the programs that were tried
        for row in setting.rows():
            body = {"max_tokens": 1, "temperature": 0, **row}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            counted.append(httpx.post(f"{server.url}/tokenize", json=row, timeout=60).json())
    assert [each["tokens"] for each in counted] == setting.expected()
    return setting.seen


def in_a_file_of_requests(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    jaxllm.save_hf(setting.folder, setting.model, setting.tokenizer)
    submit = Answer.submit

    def spy(self: Answer, prompts: Any, *arguments: Any, **options: Any) -> Any:
        setting.seen.extend(map(list, prompts))
        return submit(self, prompts, *arguments, **options)

    monkeypatch.setattr(Answer, "submit", spy)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**row, "max_tokens": 1},
        }
        for number, row in enumerate(setting.rows())
    ]
    source, target = setting.folder / "requests.jsonl", setting.folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", str(setting.folder), "--input", str(source), "--output", str(target)]
    arguments += ["--slots", "4", "--context", "512", "--quiet"]
    assert generate_command.main(arguments, "jaxllm generate") == 0
    asked = [ids for ids in setting.seen if any(ids)]  # others try the programs
    assert sorted(distinct(asked)) == sorted(distinct(setting.expected()))
    return setting.expected()


def in_training(setting: Setting, source: str) -> list[list[int]]:
    """The ids that the loss reads, and those of the prompts with which an evaluation generates."""
    rows = setting.rows(prompts=False)
    fields: dict[str, Any] = {"format": "chat", "shuffle": False, "max_length": 512}
    if source == "rows":
        given = {"rows": rows}
    else:
        path = setting.folder.parent / f"rows{source}"
        write_rows(rows, path)
        fields["path"], given = str(path), {}
        prompts = generation_rows(DataConfig(**fields), setting.tokenizer, setting.info())
        assert [list(each.prompt) for each in prompts] == setting.expected()
    batches = make_batches(
        DataConfig(**fields), setting.tokenizer, model=setting.info(), batch_size=1, epochs=1,
        **given,
    )  # fmt: skip
    found = [
        batch["input_ids"][0][np.asarray(batch["attention_mask"][0], bool)].tolist()
        for batch in batches
    ]
    assert sorted(found) == sorted(setting.expected("ids"))
    return setting.expected()


def in_preferences(setting: Setting) -> list[list[int]]:
    """The last answer is both chosen, and, in another form, rejected."""
    rows = []
    for row in setting.rows(prompts=False):
        *prompt, answer = row["messages"]
        tools = {"tools": row["tools"]} if "tools" in row else {}
        other = {"role": "assistant", "content": "No."}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [other], **tools})
    config = DataConfig(format="preference", shuffle=False, max_length=512)
    batches = make_batches(
        config, setting.tokenizer, model=setting.info(), batch_size=1, rows=rows, epochs=1
    )
    found = [
        batch["input_ids"][0, 0][np.asarray(batch["attention_mask"][0, 0], bool)].tolist()
        for batch in batches
    ]
    assert sorted(found) == sorted(setting.expected("ids"))
    return setting.expected()


ENTRANCES: dict[str, Callable[..., list[list[int]]]] = {
    "apply_chat_template": in_python,
    "BatchGenerator": in_a_batch,
    "generate_texts": in_texts,
    "embed": in_vectors,
    "pipeline": in_a_pipeline,
    "generate": in_a_job,
    "generate --input .csv": lambda setting: in_a_job(setting, suffix=".csv"),
    "generate --input .parquet": lambda setting: in_a_job(setting, suffix=".parquet"),
    "generate --score": lambda setting: in_a_job(setting, "--score"),
    "generate --embed": lambda setting: in_a_job(setting, "--embed", "mean"),
    "generate with requests": in_a_file_of_requests,
    "serve": in_requests,
    "train": lambda setting: in_training(setting, ".jsonl"),
    "train with rows": lambda setting: in_training(setting, "rows"),
    "train with .csv": lambda setting: in_training(setting, ".csv"),
    "train with .parquet": lambda setting: in_training(setting, ".parquet"),
    "train on preferences": in_preferences,
}
TEXT_ONLY = {
    "commands": {
        "chat": "takes lines of a terminal",
        "doctor": "takes nothing",
        "eval": "takes a text, or the chats of lm-evaluation-harness",
        "export": "takes a run",
        "plan": "takes sizes",
        "verify": "takes a checkpoint",
    },
    "formats": {"text", "prompt_completion", "seq2seq", "classification"},
    "routes": {
        *("/v1/completions", "/v1/embeddings", "/detokenize"),
        *("/v1/models", "/v1/models/{name:path}", "/health", "/metrics"),
    },
    "names": {
        *("GenerationConfig", "JaxLLMError", "enable_compile_cache", "generate", "load"),
        *("load_orbax", "make_mesh", "plan", "push_to_hub", "save_hf", "save_orbax", "score"),
        *("set_progress", "stream", "train"),
    },
}
"""What takes no messages. `generate` and `stream` take ids, `score` takes texts."""


def test_all_entrances_of_the_package_are_listed():
    assert set(COMMANDS) - set(TEXT_ONLY["commands"]) == {"generate", "serve", "train"}
    formats = typing.get_args(typing.get_type_hints(DataConfig)["format"])
    assert set(formats) - TEXT_ONLY["formats"] == {"chat", "preference"}
    names = {"BatchGenerator", "embed", "generate_texts", "pipeline"}
    assert set(jaxllm.__all__) - TEXT_ONLY["names"] == names
    with running_server(context=16) as server:
        paths = {route.path for route in make_app(server.server.startup).routes}
    assert paths - TEXT_ONLY["routes"] == {"/v1/chat/completions", "/tokenize"}


BY_DEFAULT = [f"{entrance}-{style}" for entrance in ENTRANCES for style in STYLES[:1]]
BY_DEFAULT += [f"apply_chat_template-{style}" for style in STYLES[1:]]
BY_DEFAULT += [f"train with rows-{style}" for style in STYLES[1:]]


@pytest.mark.by_default(*BY_DEFAULT)
@pytest.mark.parametrize("setting", STYLES, indirect=True)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_ids_that_reach_the_model(setting: Setting, entrance: str, monkeypatch):
    function = ENTRANCES[entrance]
    patches = {"monkeypatch": monkeypatch} if function.__code__.co_argcount > 1 else {}
    assert distinct(function(setting, **patches)) == distinct(setting.expected())
