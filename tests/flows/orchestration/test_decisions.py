"""What a flow run decides is kept in the project, whatever folder the run works in."""

from pathlib import Path

import pytest

from flows.orchestration import decisions
from stages.lib.core.params import Params


def test_an_isolated_run_that_begins_again_finds_its_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "a-run")
    project, workspace = tmp_path / "project", tmp_path / "project/.rondo/workspaces/one"
    workspace.mkdir(parents=True)
    monkeypatch.chdir(project)
    home = Path(".rondo").resolve()
    assert decisions.decided_params(home, "one") is None
    monkeypatch.chdir(workspace)
    Path("params.yaml").write_text("seed: 0\n")
    decisions.own_params(home, "one", lambda: Params(seed=5))
    assert decisions.decide_once(home, "rounds", lambda: 2) == 2

    monkeypatch.chdir(project)  # the flow starts again from the top
    again = decisions.decided_params(home, "one")
    assert again is not None and again.seed == 5
    assert decisions.decide_once(home, "rounds", lambda: 3) == 2
    assert decisions.decided_params(home, "another") is None
    monkeypatch.chdir(workspace)
    assert decisions.own_params(home, "one", lambda: Params(seed=6)).seed == 5
