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

from jaxllm.cli.generate import _parser as parser
from jaxllm.cli.generate import check_flags
from jaxllm.cli.train import _parser as train_parser
from jaxllm.cli.train import split_options
from jaxllm.training.run.recipe import parse_yaml, read_recipe

DEPLOY = ROOT / "deploy"
SBATCH, JOBSET = DEPLOY / "train.sbatch", DEPLOY / "train-jobset.yaml"
BATCH, RAY_JOB = DEPLOY / "batch.sbatch", DEPLOY / "batch-rayjob.yaml"


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
    options = train_parser("jaxllm train")
    own, overrides = split_options(shlex.split(words.replace('"$@"', "recipe.yaml")), options)
    known = options.flags(take_values=True) | options.flags(take_values=False)
    assert "--resume" in own
    assert {word for word in own if word.startswith("--")} <= known
    overrides = {name: value for name, value in overrides.items() if name != "model.path"}
    recipe = read_recipe(
        write_recipe(tmp_path), {key: parse_yaml(value) for key, value in overrides.items()}
    )
    assert recipe.output_dir is not None


@pytest.mark.parametrize("script", [SBATCH, BATCH])
def test_the_scripts_are_bash(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/bin/bash\n")


def test_batches_on_ray():
    """The options exist, and there is a GPU for each actor."""
    (job,) = yaml.safe_load_all(RAY_JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    lines = {"rayjob": job["spec"]["entrypoint"], "sbatch": BATCH.read_text().replace("\\\n", "")}
    for name, line in lines.items():
        (words,) = re.findall(r"jaxllm generate (.*--engine.*)$", line, re.MULTILINE)
        arguments = parser("generate").parse_args(
            shlex.split(words.replace('"$@"', "--input rows.jsonl --output out.jsonl"))
        )
        check_flags(arguments)
        lines[name] = arguments
        assert (arguments.engine, arguments.resume) == ("ray", True)
        assert arguments.actor_resources == {"GPU": 1}
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert lines["rayjob"].actors == gpus
    nodes, per_node = re.findall(r"--(?:nodes|gpus-per-node)=(\d+)", BATCH.read_text())
    assert lines["sbatch"].actors == int(nodes) * int(per_node)


def test_the_hosts_agree():
    job, command = job_template(), commands()["jobset"]
    assert job["parallelism"] == job["completions"] == 4
    assert f"--num-processes {job['completions']} " in command
    assert f"--coordinator {job['first']}:" in command
    assert job["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX
