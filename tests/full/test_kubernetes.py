"""The manifests of scripts/kubernetes fit the schemas of Kubernetes, and their commands run in stand-ins for pods."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from testbed.pods import Pods

FOLDER = Path(__file__).parents[2] / "scripts" / "kubernetes"
FILES = {"indexed_job": "train-0.train", "jobset": "train-node-0-0.train", "trainjob": "train-node-0-0.train"}


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def _jobs(name: str) -> Iterator[dict[str, Any]]:
    """Yield the Jobs of a manifest; those of JobSets and TrainingRuntimes are templates, which no schema here has."""
    for document in _documents(name):
        spec = document["spec"]
        if document["kind"] == "Job":
            yield document
        templates = {"JobSet": spec, "TrainingRuntime": spec.get("template", {}).get("spec", {})}
        for each in templates.get(document["kind"], {}).get("replicatedJobs", ()):
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}


def _command(name: str) -> list[str]:
    (job,) = _jobs(name)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    trainers = [d["spec"]["trainer"] for d in _documents(name) if d["kind"] == "TrainJob"]
    chosen = trainers[0] if trainers else container
    return [*chosen["command"], *chosen["args"]]


@pytest.mark.parametrize("name", FILES)
def test_what_kubernetes_defines_fits_its_schema(name: str) -> None:
    version = kubernetes_validate.latest_version()
    services = [document for document in _documents(name) if document["kind"] == "Service"]
    for document in (*_jobs(name), *services):
        kubernetes_validate.validate(document, version, strict=True)
    (job,) = _jobs(name)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "unknown": 1}}, version, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_a_pod_gets_what_a_run_in_it_needs(name: str) -> None:
    (job,) = _jobs(name)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/etc/dtrain"]["secret"] == {"secretName": "dtrain-token", "defaultMode": 0o440}
    assert pod["terminationGracePeriodSeconds"] > 45
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
    exit_codes, _ = job["spec"]["podFailurePolicy"]["rules"]
    assert exit_codes["onExitCodes"]["containerName"] == container["name"]
    assert "--grace-s=45" in _command(name)
    assert not any("DTRAIN_TOKEN" in variable["name"] for variable in container["env"])


def test_the_service_has_the_pods_of_the_job() -> None:
    service, job = _documents("indexed_job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("name", FILES)
def test_its_command_runs_in_two_pods(pods: Pods, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'], flush=True)")
    token = tmp_path / "token"
    token.write_text("x" * 64)
    token.chmod(0o440)
    replaced = {"/etc/dtrain/token": str(token), "/tmp/runs": str(tmp_path / "runs"), "/app": str(tmp_path)}
    program, *args = _command(name)
    assert program == "dtrain"
    for old, new in replaced.items():
        args = [arg.replace(f"={old}", f"={new}") for arg in args]
    master = FILES[name]
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(2):
            env = {"JOB_COMPLETION_INDEX": str(index), "CUDA_VISIBLE_DEVICES": ""}
            if name == "trainjob":  # the operator sets these
                env |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
                env |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": "29500"}
            host = master.partition(".")[0].removesuffix("0") + str(index)
            command = [sys.executable, "-m", "launcher", *args]
            running.append(stack.enter_context(pods.pod(host, *command, cwd=tmp_path, env=env)))
        pods.publish(master, running[0].address)
        (code, out, err), (code1, _, err1) = (pod.end() for pod in running)
    assert (code, code1) == (0, 0), (err, err1)
    assert sorted(line.partition("rank ")[2] for line in out.splitlines()) == ["0", "1"]
