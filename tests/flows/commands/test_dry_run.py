"""`rondo run --dry-run` names the stages that the run itself would find."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from flows.commands.dry_run import addresses_of, stages_that_would_run
from flows.core.config import resolve
from flows.core.git import git
from flows.execution import dvc_stages, history, inputs

DRY = ["run", "--dry-run"]


def state_of(folder: Path) -> dict[str, bytes]:
    """All files but those of git and of Python."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {".git", "__pycache__", "tmp"} & set(path.parts)
    }


def would_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.exit_code([*DRY, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.removeprefix("would run: ") for line in lines if line.startswith("would run: ")]
    return listed[0].split(", ") if listed else []


def test_an_unchanged_project_has_nothing_to_do(finished_project, capsys):
    before = state_of(finished_project)
    assert cli.exit_code(DRY) == 0
    assert capsys.readouterr().out.splitlines() == [
        "params.yaml: no changes",
        "to do: nothing; all 5 stages are up to date",
    ]
    assert state_of(finished_project) == before


def test_json(finished_project, capsys):
    assert cli.exit_code([*DRY, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values == {
        **{"changes": [], "ended": [], "would_run": [], "engine_commands": []},
        "needs": ["to do: nothing; all 5 stages are up to date"],
    }
    assert cli.exit_code([*DRY, "--json", "--set", "seed=5"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["changes"] == ["seed 0 -> 5"] and "sft@r0" in changed["would_run"]
    assert cli.exit_code(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["stages"]["sft"] == {"r0": "done"} and status["stages"]["assets"] == {"": "done"}
    assert status["ended"] == []
    assert cli.exit_code(["run", "--json"]) == 2
    assert "--json is of --dry-run" in json.loads(capsys.readouterr().out)["message"]


def change_code() -> None:
    Path("stage.py").write_text(Path("stage.py").read_text() + "\n")


def change_params() -> None:
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("seed: 0", "seed: 3"))


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ([], change_code),
        ([], change_params),
        (["seed=0"], change_params),  # back to what the stages have run with
        ([], lambda: Path("rounds/r0/sft/metrics.jsonl").unlink()),
        (["seed=5"], None),
        (["sft.max_steps=9"], None),
        (["evaluate.samples_per_prompt=3"], None),
        (["gates.sft.loss_drop=0.05"], None),
        (["sft.lora.r=8", "evaluate.tie_margin=0.1"], None),
        (["sft.learning_rate=5e-05"], None),
        (["prepare.sources=[{path: mine.jsonl}]", "assets.data=files"], None),
    ],
)
def test_it_names_the_stages_that_the_run_finds(
    finished_project, settings: list[str], change: Callable[[], object] | None
):
    Path("mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    if change:
        change()
    params = resolve(settings=settings)
    named = stages_that_would_run(params, addresses_of(list(params.rounds)))
    # what the pipeline does
    history.write(params, [])
    inputs.refresh(params, finished_project / ".rondo", print)
    addresses, todo = dvc_stages.order_and_changes(list(params.rounds))
    assert named == todo
    assert addresses == addresses_of(list(params.rounds))


def test_a_changed_setting_is_printed_with_what_would_run_and_nothing_is_written(
    finished_project, capsys
):
    before, status = state_of(finished_project), git("status", "--porcelain")
    assert cli.exit_code([*DRY, "--set", "evaluate.samples_per_prompt=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["params.yaml would change:", "  evaluate.samples_per_prompt 2 -> 3"]
    assert any(line.startswith("to do: 1 of 5 stages of 1 round(s)") for line in lines)
    assert any(line.startswith("GB of memory at least") for line in lines)
    assert any(line.startswith("disk: ") for line in lines)
    assert lines[-2:] == ["would run: evaluate@r0", "nothing was run"]
    assert state_of(finished_project) == before and git("status", "--porcelain") == status


def test_a_new_round_runs_whole_and_the_ended_one_not(finished_project, capsys):
    stages = ["prepare@r1", "sft@r1", "gate_sft@r1", "evaluate@r1"]
    assert cli.exit_code([*DRY, "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ended, not run again (--rerun does): r0" in lines
    assert f"would run: {', '.join(stages)}" in lines
    assert would_run(capsys, "--preset", "default") == stages  # two rounds, none of them ended
    Path("rounds/r0/replay").mkdir()
    Path("rounds/r0/replay/metrics.json").write_text("{}")
    assert cli.exit_code(["next-round", "--dry-run", "--set", "seed=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"would run: {', '.join(stages)}" in lines and "  seed 0 -> 4" in lines
    assert not Path("rounds/r1").exists()


def test_a_small_rate_that_dvc_has_recorded_is_no_change(finished_project):
    """DVC writes 5e-05, which YAML 1.1 takes for a text."""
    params = resolve(settings=["sft.learning_rate=5e-05"])
    history.write(params, [])
    for address in dvc_stages.stage_order(["r0"]):
        dvc_stages.run(address, print)
    assert "learning_rate: 5e-05" in Path("dvc.lock").read_text()
    assert stages_that_would_run(resolve(), addresses_of(["r0"])) == set()


def test_a_round_that_runs_again_is_compared_with_what_it_ran_on(finished_project):
    both = resolve(number=2)
    history.write(both, ["r0"])
    for address in dvc_stages.stage_order(["r1"]):
        dvc_stages.run(address, print)
    assert stages_that_would_run(both, addresses_of(["r1"])) == set()
    changed, addresses = resolve(settings=["evaluate.tie_margin=0.2"]), addresses_of(["r0", "r1"])
    assert stages_that_would_run(both, addresses) == set()
    assert stages_that_would_run(changed, addresses) == {"evaluate@r0", "evaluate@r1"}


def test_what_a_run_would_refuse_is_refused(finished_project, capsys):
    assert cli.exit_code([*DRY, "--set", "ppo.kl_coef=-1"]) == 2
    assert "ppo.kl_coef" in capsys.readouterr().err
    assert cli.exit_code([*DRY, "--continue", "x"]) == 2
    assert "takes no other options" in capsys.readouterr().err
