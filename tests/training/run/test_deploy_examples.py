"""The examples in deploy/ for clusters: they parse, and name options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT
from tiny_runs import write_recipe

from jaxllm.cli.train import SWITCHES, VALUED, split_options
from jaxllm.training.run.recipe_file import parse_yaml, read_recipe

SBATCH, JOBSET = ROOT / "deploy" / "train.sbatch", ROOT / "deploy" / "train-jobset.yaml"


def job_template() -> dict[str, Any]:
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    first = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    return {"first": first, **job["template"]["spec"]}


def commands() -> dict[str, str]:
    (container,) = job_template()["template"]["spec"]["containers"]
    (line,) = re.findall(r"^srun (.*)$", SBATCH.read_text(), re.MULTILINE)
    return {"sbatch": line, "jobset": container["command"][-1]}


@pytest.mark.parametrize("name", ["sbatch", "jobset"])
def test_the_options_exist(name: str, tmp_path: Path):
    _, words = commands()[name].split("jaxllm train ")
    own, overrides = split_options(shlex.split(words.replace('"$@"', "recipe.yaml")))
    known = {*SWITCHES, *VALUED}
    assert "--resume" in own
    assert {word for word in own if word.startswith("--")} <= known
    overrides = {name: value for name, value in overrides.items() if name != "model.path"}
    recipe = read_recipe(
        write_recipe(tmp_path), {key: parse_yaml(value) for key, value in overrides.items()}
    )
    assert recipe.output_dir is not None


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    assert SBATCH.read_text().startswith("#!/bin/bash\n")


def test_the_hosts_agree():
    job, command = job_template(), commands()["jobset"]
    assert job["parallelism"] == job["completions"] == 4
    assert f"--num-processes {job['completions']} " in command
    assert f"--coordinator {job['first']}:" in command
    assert job["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX
