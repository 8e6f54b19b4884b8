"""Runs tasks of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from jaxllm.common.errors import InputError
from jaxllm.common.spelling import closest
from jaxllm.evaluate.lm_eval.model import JaxLM

_NAMED = re.compile(rb"""\b(?:task|group|tag)["']?\s*:\s*["']?([\w.-]+)""")
"""Most names of tasks in their YAML files, as they are written there."""


@dataclasses.dataclass(frozen=True)
class LoadedTasks:
    """Tasks and groups of tasks with their data."""

    tasks: list[Any]
    """Each a `lm_eval.api.task.Task` or `lm_eval.api.group.Group`."""
    manager: TaskManager


def load_tasks(
    names: Sequence[str], include_path: str | PathLike[str] | None = None
) -> LoadedTasks:
    """Loads tasks with their data.

    The index of the harness's own 14,000 tasks takes seconds; it is read only if a name is not in
    `include_path`.

    Args:
        names: names of tasks, groups or tags; `*` stands for any characters.
        include_path: folder of further tasks (YAML files), which replace those of the same name.
    """
    folder = None if include_path is None else Path(include_path)
    if folder is not None and not folder.is_dir():
        raise InputError(f"include_path: {folder} is not a folder")
    manager = TaskManager(include_path=folder, include_defaults=False)
    others = [name for name in names if not manager.match_tasks([name])]
    if others:
        _check_named(others)
        manager = TaskManager(include_path=folder)
    tasks: list[Task | Group] = []
    for name in names:
        if not (matches := manager.match_tasks([name])):
            raise _no_task(name, manager.all_tasks)
        for match in matches:
            tasks += _load(manager, match)
    specs: list[Any] = [*tasks]  # groups are taken too, which the annotation leaves out
    try:
        manager.load(specs)
    except ValueError as failure:  # a task by itself and in a group, or in two
        raise InputError(f"tasks: {failure}") from None
    return LoadedTasks(specs, manager)


def _check_named(names: Sequence[str]) -> None:
    """Raises InputError for a name that no file of the harness's own tasks contains.

    Reading these 14,000 files takes a second or two, and parsing them for the index ten.
    """
    missing = {name: [part.encode() for part in name.split("*")] for name in names}
    named: set[bytes] = set()
    for base, _, files in os.walk(Path(lm_eval.tasks.__file__).parent):
        for file in files:
            if file.endswith((".py", ".pyc", ".md", ".json", ".jsonl", ".txt")):
                continue
            text = Path(base, file).read_bytes()
            named.update(_NAMED.findall(text))
            for name in [n for n, parts in missing.items() if all(p in text for p in parts)]:
                del missing[name]
        if not missing:
            return
    raise _no_task(next(iter(missing)), [name.decode(errors="replace") for name in named])


def _no_task(name: str, others: Sequence[str]) -> InputError:
    near = closest(name, others)
    hint = f"; is it {near}?" if near else ""
    return InputError(f"tasks: no task {name!r}{hint}; `lm_eval ls tasks` lists them")


def _load(manager: TaskManager, name: str) -> list[Task | Group]:
    """A task or group, or the tasks of a tag."""
    try:
        loaded = manager.load([name])
    except Exception as failure:  # of a task's own code, its data, the network, a missing package
        problem = f"{type(failure).__name__}: {failure}"
        raise InputError(f"tasks: {name!r} cannot be loaded ({problem})") from failure
    group = loaded.get("groups", {}).get(name)
    return list(loaded.get("tasks", {}).values()) if group is None else [group]


def run_tasks(
    lm: JaxLM,
    tasks: LoadedTasks,
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Results of tasks with every example, as `lm_eval.simple_evaluate` returns them.

    Args:
        num_fewshot: examples before each question; None: as the task says.
        limit: examples of each task; below 1 a fraction of them.
        apply_chat_template: prompts are chats, for the model's chat template.
        system_instruction: first message of such a chat, or first text of a prompt.
        gen_kwargs: generation fields that replace those of the tasks.
    """
    if limit is not None and not limit > 0:
        raise InputError(f"limit: expected a positive number, found {limit}")
    if num_fewshot is not None and num_fewshot < 0:
        raise InputError(f"num_fewshot: expected 0 or more, found {num_fewshot}")
    with without_processes():
        results = simple_evaluate(
            model=lm,
            tasks=tasks.tasks,
            task_manager=tasks.manager,
            num_fewshot=num_fewshot,
            batch_size=lm.batch_size,
            limit=limit,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            gen_kwargs=None if gen_kwargs is None else dict(gen_kwargs),
        )
    assert results is not None  # None is for processes of a rank above 0
    return {**results}


def results_json(results: Mapping[str, Any]) -> bytes:
    """The results as JSON, with what it lacks written as the harness does."""
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return f"{text}\n".encode()


def results_table(results: Mapping[str, Any]) -> str:
    """The harness's table of results, and that of groups if there are any."""
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)


@contextmanager
def without_processes() -> Generator[None]:
    """Standard errors by bootstrap are computed here: a fork of a process with JAX may hang."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
