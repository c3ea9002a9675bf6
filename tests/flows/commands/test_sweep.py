"""The flow `sweep`, as a worker executes it for the form, with small stages."""

from pathlib import Path

import yaml
from prefect.client.orchestration import SyncPrefectClient

from flows.commands.sweep import sweep
from flows.core.git import git
from tests.flows.test_pipeline import execute, submit

VALUES, SEEDS = ["4", "1"], [5, 6]  # the stage sft cannot train with the second value


def test_a_sweep_runs_each_point_on_a_branch_and_compares_them(
    project: Path, prefect: SyncPrefectClient
) -> None:
    settings = ["gates.sft.loss_drop=0.9"]
    points = {"key": "sft.max_steps", "values": VALUES, "seeds": SEEDS, "settings": settings}
    state = execute(prefect, sweep, submit(prefect, sweep, **points))
    assert state.name == "Failed"
    assert "runs done: 2" in str(state.message) and "BadInput: rows missing" in str(state.message)
    check_table(project)
    check_branches(project)


def check_table(project: Path) -> None:
    [table] = (project / "reports").glob("sweep-*.md")
    rows = table.read_text().splitlines()[2:]
    settings = [row.split("|")[2].strip() for row in rows]
    assert settings == [f"sft.max_steps={value}, seed={seed}" for seed in SEEDS for value in VALUES]
    for row in rows[::2]:
        assert "r0: SFT is at fault: it learnt too little (drop of the loss" in row
    for row in rows[1::2]:
        assert "BadInput: rows missing" in row and "SFT is at fault" not in row


def check_branches(project: Path) -> None:
    branches = git("branch", "--format=%(refname:short)", "--list", "runs/*").split()
    assert [name[-2:] for name in branches] == [".0", ".1", ".2", ".3"]
    prepared = [  # once per seed; the second value has DVC's results of the first
        (project / f".rondo/workspaces/{Path(name).name}/.rondo/work/r0/prepare").exists()
        for name in branches
    ]
    assert prepared == [True, False, True, False]
    for branch, seed in zip(branches[::2], SEEDS, strict=True):
        assert yaml.safe_load(git("show", f"{branch}:params.yaml"))["seed"] == seed
