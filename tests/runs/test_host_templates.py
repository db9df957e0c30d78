"""Templates of docs/hosts: what can be held of them without their platforms."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jax._src.clusters import slurm_cluster

from posttrain.config.yaml_file import load_config
from posttrain.plan.machine import machine
from posttrain.stages.table import check_processes
from tests.runs.test_processes import SLURM, two_stages, values
from tests.stages.runs import ROOT, start_environment
from tests.test_readme import posttrain_command

FOLDER = ROOT / "docs" / "hosts"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    properties = required | optional
    return {
        "type": "object",
        "required": [*required],
        "properties": properties,
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": NUMBER}
CONTAINER = record(
    {"name": TEXT, "image": TEXT, "command": items(TEXT)},
    resources=record({}, requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=items(record({"name": TEXT, "mountPath": TEXT})),
)
POD = record(
    {"containers": items(CONTAINER)},
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=NUMBER,
    nodeSelector=TEXTS,
    volumes=items(record({"name": TEXT}, persistentVolumeClaim=record({"claimName": TEXT}))),
)
JOB = record(
    {"parallelism": NUMBER, "completions": NUMBER, "template": record({"spec": POD})},
    completionMode={"const": "Indexed"},
    backoffLimit=NUMBER,
    podFailurePolicy=record(
        {
            "rules": items(
                record(
                    {"action": {"enum": ["FailJob", "Ignore", "Count"]}},
                    onExitCodes=record({"operator": {"enum": ["In", "NotIn"]}, "values": items(NUMBER)}),
                    onPodConditions=items(record({"type": TEXT})),
                )
            )
        }
    ),
)
JOBSET = record(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": record({"name": TEXT}, annotations=TEXTS),
        "spec": record(
            {"replicatedJobs": items(record({"name": TEXT, "replicas": NUMBER, "template": record({"spec": JOB})}))},
            failurePolicy=record(
                {"maxRestarts": NUMBER},
                rules=items(
                    record(
                        {"action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]}},
                        onJobFailureReasons=items({"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]}),
                    )
                ),
            ),
        ),
    }
)
PATHWAYS = record(
    {
        "apiVersion": {"const": "pathways-job.pathways.domain/v1"},
        "kind": {"const": "PathwaysJob"},
        "metadata": record({"name": TEXT}),
        "spec": record(
            {
                "workers": items(record({"type": TEXT, "topology": TEXT, "numSlices": NUMBER})),
                "pathwaysDir": {"type": "string", "pattern": "^gs://"},
                "controller": record(
                    {"deploymentMode": {"enum": ["default", "colocate_head_with_workers"]}},
                    mainContainerName=TEXT,
                    template=record({"spec": POD}),
                ),
            },
            maxRestarts=NUMBER,
        ),
    }
)
"""The fields that the templates use, as the definitions of both kinds have them."""


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def commands() -> dict[str, list[str]]:
    """The command of each template."""
    found = {}
    for script in SCRIPTS:
        (line,) = re.findall(r"posttrain run [^\"\n]+", script.read_text().replace("$SHARED", "/mnt/shared"))
        found[script.name] = shlex.split(line)
    job = manifest("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    found["jobset.yaml"] = job["containers"][0]["command"]
    main = manifest("pathways.yaml")["spec"]["controller"]["template"]["spec"]["containers"][0]["command"]
    found["pathways.yaml"] = main
    tree = ast.parse((FOLDER / "remote.py").read_text())
    (command,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    found["remote.py"] = ast.literal_eval(command)
    return found


def test_all_templates_are_here() -> None:
    assert commands().keys() == {path.name for path in FOLDER.iterdir() if path.suffix != ".md"}


@pytest.mark.parametrize("name", commands())
def test_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed by the parser of the command line; the configuration passes its check, for as many hosts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = commands()[name]
    assert words[:2] == ["posttrain", "run"]
    posttrain_command(words)
    check_processes(load_config(words[2], words[3:]), machine("v5e-16").num_hosts, 16)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


def test_manifests() -> None:
    jobset = manifest("jobset.yaml")
    jsonschema.validate(jobset, JOBSET)
    jsonschema.validate(manifest("pathways.yaml"), PATHWAYS)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert job["parallelism"] == job["completions"] == machine(f"v5e-{chips}").num_hosts
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] * job["parallelism"] == chips


def test_templates_start_again_what_would_resume() -> None:
    """The same exit codes in both, those of the page that come from outside of the run and are no wish of a person."""
    page = (FOLDER / "hosts.md").read_text()
    resuming = {int(code) for code in re.findall(r"^\| (\d+) \|.*\| resumes \|$", page, re.M)} - {130}
    job = manifest("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]
    rule = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert rule["operator"] == "In" and set(rule["values"]) == resuming == {75, 137, 143}
    (codes,) = re.findall(r"in ([\d| ]+)\) scontrol requeue", (FOLDER / "slurm.sh").read_text())
    assert set(map(int, codes.split(" | "))) == resuming


def test_slurm_sets_what_jax_reads() -> None:
    """The variables of a step, which only `srun` sets."""
    names = ("_JOBID_PARAM", "_NODE_LIST", "_PROCESS_COUNT", "_PROCESS_ID", "_LOCAL_PROCESS_ID")
    assert {getattr(slurm_cluster, name) for name in names} == SLURM.keys()
    assert re.search(r"^srun .*posttrain run", (FOLDER / "slurm.sh").read_text(), re.M)


@pytest.mark.thorough
def test_tasks_of_slurm(tmp_path: Path) -> None:
    """Two tasks with the variables of a step on this machine: JAX joins them by itself."""
    step = SLURM | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    command = [sys.executable, "-m", "posttrain", "run", str(two_stages(tmp_path))]
    tasks = [
        subprocess.Popen(
            command, cwd=ROOT, env=start_environment() | step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}
        )
        for n in range(2)
    ]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    assert len(values(tmp_path / "out")) == 13
