"""What a flow run decides is kept in the project, whatever folder the run works in."""

from pathlib import Path

import pytest

from flows.core.run_locks import hold_run_lock
from flows.orchestration import decisions
from stages.lib.core.errors import BadInput
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


def test_only_a_run_with_settings_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would go on with those of params.yaml."""
    run = "20261127-120000-0a1b2c3d"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0a1b2c3d")
    hold_run_lock(decisions.decisions_path(tmp_path))
    decisions.decide_once(tmp_path, "run", lambda: run)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "another-run")
    with pytest.raises(BadInput, match=f"run {run} ended before it had recorded its settings"):
        decisions.take_over(tmp_path, run)
    assert not decisions.decisions(tmp_path)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0a1b2c3d")
    params = Params(seed=5).model_dump(mode="json")
    decisions.decide_once(tmp_path, f"params of {run}", lambda: params)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "another-run")
    decisions.take_over(tmp_path, run)
    taken = decisions.decided_params(tmp_path, run)
    assert taken is not None and taken.seed == 5
    assert decisions.decisions(tmp_path)["run"] == run


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "a-run")
    decisions.decide_once(tmp_path, "params", lambda: {"seed": 5})
    path = decisions.decisions_path(tmp_path)
    path.write_text(path.read_text()[:-3])
    with pytest.raises(BadInput, match=rf"{path}(.|\n)*start the run again"):
        decisions.decisions(tmp_path)
