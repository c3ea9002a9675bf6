"""The example for Kubernetes, against the schemas of Kubernetes and against what it names. It was
never applied to a cluster.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import cli
from flows.core.services import API_URL
from tests.paths import ROOT
from tests.stores.conftest import FOLDER

EXAMPLE = ROOT / "examples/kubernetes/rondo.yaml"


@pytest.fixture
def documents() -> dict[tuple[str, str], Any]:
    loaded = yaml.safe_load_all(EXAMPLE.read_text())
    return {(document["kind"], document["metadata"]["name"]): document for document in loaded}


def containers(document: Any) -> list[Any]:
    pod = document["spec"]["template"]["spec"]
    return pod["containers"] + pod.get("initContainers", [])


@pytest.mark.skipif(not FOLDER, reason="needs the schemas of Kubernetes: make test-stores")
def test_each_document_has_its_schema(tmp_path):
    def validate(text: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "made.yaml").write_text(text)
        command = [f"{FOLDER}/stores/bin/kubernetes-validate", "--strict", "made.yaml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    text = EXAMPLE.read_text()
    ended = validate(text)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("passed") == text.count("apiVersion:")
    for right, wrong in (
        ("replicas: 1", "replicas: one"),
        ("  command: [python", "  comand: [python"),
    ):
        assert validate(text.replace(right, wrong)).returncode != 0


def test_the_worker_runs_a_command_that_rondo_has(documents):
    [worker, clone] = containers(documents["StatefulSet", "rondo-worker"])
    program, command = worker["command"][:3], worker["command"][3:]
    assert program == ["python", "-m", "flows.cli"]
    function, arguments, _ = cli.app.parse_args(command)
    assert function is cli.worker
    assert arguments.arguments == {"name": "k8s", "push": "origin"}
    assert worker["workingDir"] in clone["args"][0]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert environment["PYTHONPATH"] == worker["workingDir"]
    service = documents["Service", "prefect"]["spec"]["ports"][0]["port"]
    assert environment["PREFECT_API_URL"] == f"http://prefect:{service}/api"
    names = re.findall(r"[A-Z]+(?:_[A-Z]+)+", str(cli.worker.__doc__))
    assert API_URL in names and environment.keys() >= set(names)


def test_what_the_pods_name_is_there(documents):
    secrets = {
        (name, key)
        for (kind, name), document in documents.items()
        if kind == "Secret"
        for key in document["stringData"]
    }
    for kind, name in (("Deployment", "prefect"), ("StatefulSet", "rondo-worker")):
        spec = documents[kind, name]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec["template"]["spec"].get("volumes", [])}
        for container in containers(documents[kind, name]):
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= claims | volumes
            for entry in container["env"]:
                if "valueFrom" in entry:
                    reference = entry["valueFrom"]["secretKeyRef"]
                    assert (reference["name"], reference["key"]) in secrets
    assert documents["Service", "prefect"]["spec"]["selector"] == {"app": "prefect"}


def test_the_image_has_what_a_worker_needs():
    dockerfile = (ROOT / "examples/kubernetes/Dockerfile").read_text()
    [extras] = re.findall(r"/rondo\[([\w,]+)\]", dockerfile)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    for name in re.findall(r"-r /rondo/(\S+)", dockerfile):
        assert Path(ROOT / name).exists()
