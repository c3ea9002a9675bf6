"""Which reward models are served: those whose gate has passed on their very files."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.serving.accepted_model import NOT_JUDGED, ServedModel, find_model
from stages.gate.approvals import Approval, write_approval
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import file_hash
from stages.lib.core.params import check_params
from tests.flows.serving.conftest import MAKE, make_judged_project, repro
from tests.stages.gate.test_gate import BATTERY

MODEL = Path("rounds/r0/reward/model")


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Path:
    model = tmp_path_factory.mktemp("model")
    (model / "weights").write_text("0")
    return make_judged_project(tmp_path_factory.mktemp("judged"), model)


@pytest.fixture
def project(judged, tmp_path, monkeypatch, fast_processes) -> Path:
    subprocess.run(["cp", "-r", f"{judged}/.", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(policy: str = "block", allow_failed: bool = False) -> ServedModel:
    params = check_params({"gates": {"reward": {"policy": policy}}}, "test")
    return find_model(params, "r0", allow_failed)


def test_a_model_that_passes_is_served_with_its_lineage(project):
    assert asdict(find()) == {
        "name": "reward@r0",
        "folder": str(MODEL),
        "sha256": file_hash(MODEL),
        "started_from": "rounds/r0/sft/model",
        "template_hash": "cd34",
        "gate": "passed",
        "failed": [],
    }


@pytest.fixture
def failing(project) -> Path:
    Path("battery.json").write_text(json.dumps(BATTERY | {"worst_flip": 0.5}))
    repro(project)
    return project


def test_a_model_that_fails_is_refused_with_its_numbers_unless_allowed(failing):
    failed = "battery.worst_flip 0.5, wanted <= 0.2"
    with pytest.raises(GateFailed, match=f"reward@r0 does not pass its gate: {failed}; to serve"):
        find()
    allowed = find(allow_failed=True)
    assert (allowed.gate, allowed.failed) == ("failed", [failed])


def test_a_policy_of_warn_is_no_acceptance_but_an_approval_is(failing):
    with pytest.raises(GateFailed, match="worst_flip"):
        find("warn")
    failed = {"battery.worst_flip": 0.5}
    write_approval("r0", "reward", Approval(approved=False, by="Ada", reason="no", failed=failed))
    with pytest.raises(GateFailed, match="worst_flip"):
        find("ask")
    write_approval("r0", "reward", Approval(approved=True, by="Ada", reason="ok", failed=failed))
    assert find("ask").gate == "approved by Ada"


@pytest.mark.parametrize("path", [MODEL / "weights", Path("rounds/r0/battery/metrics.json")])
def test_other_files_than_those_that_were_tested_are_refused(project, path):
    path.write_text("{}")
    with pytest.raises(BadInput, match=f"{path.parent.parent}.* is not the version that"):
        find()
    allowed = find(allow_failed=True)
    assert (allowed.gate, allowed.sha256) == (NOT_JUDGED, file_hash(MODEL))


def test_a_model_that_was_trained_again_is_refused_until_it_is_tested(project):
    Path("trained/weights").write_text("1")
    repro(project, "--single-item", "reward@r0")
    with pytest.raises(BadInput, match=f"{MODEL} is not the version"):
        find()
    repro(project)
    assert find().gate == "passed"


def test_new_code_changes_no_verdict(project):
    Path("make.py").write_text(MAKE + "\n")
    assert find().gate == "passed"


def test_without_a_record_or_a_model_the_command_is_named(project):
    Path("dvc.lock").unlink()
    with pytest.raises(BadInput, match=r"rounds/r0/reward is not the version that"):
        find()
    Path("rounds/r0/reward/manifest.json").unlink()
    with pytest.raises(BadInput, match="dvc repro gate_reward@r0"):
        find()
