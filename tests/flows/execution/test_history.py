"""Ended rounds in a real DVC project with small stages (see conftest), whose rounds depend on the
one before.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.core import config
from flows.core.locks import read_lock
from flows.execution import dvc_stages, history
from stages.lib.core.ended_rounds import ended_names, params_of, settings_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_json
from stages.lib.core.params import load_params
from tests.flows.reproduce import reproduce
from tests.verdicts import failed_check

START = (
    "import pathlib; data = pathlib.Path('assets/start/evaluate/data'); "
    "data.mkdir(parents=True, exist_ok=True); (data / 'EMPTY').touch()"
)


SETTINGS = ("assets.model=tiny", "sft.learning_rate=0.00001", "evaluate.tie_margin=0.2")


def run_first_round() -> None:
    """A run of one round. `prepare` reads the data of the round before."""
    dag = yaml.safe_load(Path("dvc.yaml").read_text())
    stages = dag["stages"]
    stages["assets"]["cmd"] = f'python -c "{START}"'
    stages["assets"]["params"] = ["assets"]
    stages["prepare"]["do"]["deps"][1] = "${item.previous}/evaluate/data"
    Path("dvc.yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
    assert of_round(run(*SETTINGS)) == {"", "r0"}


@pytest.fixture
def rounds(project_after: Callable[..., Path]) -> Path:
    """The project after `run_first_round`, as working directory."""
    return project_after("first_round", run_first_round)


def run(*settings: str, number: int | None = None, rerun: tuple[str, ...] = ()) -> list[str]:
    """What a run of the pipeline does with rounds and stages; returns the stages that ran."""
    params, ended = history.resolve_run(config.KEEP, number, settings, rerun)
    history.write(params, ended)
    return reproduce(dvc_stages.stage_order(history.open_rounds(params, ended)))


def of_round(addresses: list[str]) -> set[str]:
    return {address.partition("@")[2] for address in addresses}


def to_end(number: int | None, *rerun: str, preset: str = config.KEEP) -> list[str]:
    return history.resolve_run(preset, number, (), rerun)[1]


def test_an_ended_round_is_history_until_somebody_names_it(rounds: Path) -> None:
    entry = read_lock("evaluate@r0")
    results = {path: path.read_text() for path in Path("rounds/r0").rglob("*.*")}

    assert of_round(run("seed=5", "gates.sft.loss_drop=0.3", number=2)) == {"r1"}
    assert ended_names() == {"r0"} and list(load_params().rounds) == ["r0", "r1"]
    settings = params_of("r0")
    assert (settings.seed, settings.sft.learning_rate) == (0, 0.00001)
    assert settings.evaluate.tie_margin == 0.2 and settings.gates.sft.loss_drop != 0.3
    assert params_of("r1").seed == 5
    for elsewhere in ("../other", str(rounds / "rounds/r0")):  # a form names a round
        with pytest.raises(BadInput, match="not in params"):
            params_of(elsewhere)

    # neither a setting nor an edited comment
    (rounds / "stage.py").open("a").write("# a comment\n")
    assert of_round(run("seed=6")) == {"", "r1"}
    # what the folder lacks is in DVC's cache
    subprocess.run(["rm", "-r", "rounds/r0/sft/data", "gates/r0"], check=True)
    assert run() == [] and Path("gates/r0/sft.ok").exists()
    assert {path: path.read_text() for path in results} == results
    assert read_lock("evaluate@r0") == entry

    assert run(number=3) and ended_names() == {"r0", "r1"}
    assert run(rerun=("r1",)) == [] and ended_names() == {"r0"}
    assert of_round(run("seed=3", rerun=("r0",))) == {"r0", "r1", "r2"} and not ended_names()
    with pytest.raises(BadInput, match="--rerun r9: no such round; expected one of r0, r1, r2"):
        run(rerun=("r9",))


def test_a_round_that_params_yaml_has_dropped_has_not_ended(rounds: Path) -> None:
    run(number=2)
    config.write_params(config.resolve(config.KEEP, 1))
    assert read_lock("evaluate@r1")  # which a later run may find up to date
    assert to_end(3) == ["r0"]


def test_changed_data_of_an_ended_round_concerns_those_that_read_it(rounds: Path) -> None:
    run(number=2)
    shutil.rmtree("assets/start")  # only r0 reads it
    assert dvc_stages.order_and_changes(["r1"])[1] == {"assets"}
    reproduce(["assets"])
    (stage_dir("r0", "evaluate") / "data/rows.jsonl").write_text("{}\n")
    (stage_dir("r0", "sft") / "data/rows.jsonl").write_text("{}\n")  # no stage of r1 reads it
    assert list(dvc_stages.graph_and_changes(["r1"])[1]) == ["prepare@r1"]
    addresses, todo = dvc_stages.order_and_changes(["r1"])
    assert todo == set(addresses) - {"assets"}


def test_only_a_complete_round_ends(rounds: Path) -> None:
    assert to_end(None) == []  # it has no successor
    assert to_end(2) == ["r0"]
    data, moved = stage_dir("r0", "sft") / "data", Path("elsewhere")
    data.rename(moved)
    assert to_end(2) == ["r0"]  # a worktree: DVC's cache has it
    cache = Path(".dvc/cache").rename("cache")
    assert to_end(2) == []  # a clone: dvc.lock without outputs
    cache.rename(".dvc/cache")
    moved.rename(data)
    config.write_params(config.resolve(settings=["seed=1"]))
    assert to_end(2) == ["r0"]  # complete, with other settings
    reproduce(["prepare@r0"])
    assert to_end(2) == []  # the other stages are older
    assert of_round(run(number=2)) == {"r0", "r1"}
    assert to_end(None) == ["r0"]
    assert to_end(None, preset="tiny") == [] and to_end(None, config.ALL) == []
    with pytest.raises(BadInput, match=r"assets.model is embedded, but r0 has ended with tiny"):
        run("assets.model=embedded", number=2)
    locked = Path("dvc.lock").read_text()
    Path("dvc.lock").write_text(locked.replace("learning_rate:", "rate_of_an_older_version:"))
    with pytest.raises(BadInput, match=r"r0 has run with .* \(dvc.lock: .*--rerun r0"):
        run(number=2)
    Path("dvc.lock").write_text(locked)
    assert not settings_path("r0").exists()
    assert of_round(run()) == set() and ended_names() == {"r0"}
    with pytest.raises(BadInput, match=r"assets.model is embedded, but r0 has ended with tiny"):
        run("assets.model=embedded")
    with pytest.raises(BadInput, match="--rounds 1: r0 have ended; ask for at least 2 rounds"):
        run(number=1)

    shutil.rmtree(".dvc/cache")
    shutil.rmtree(data)
    with pytest.raises(BadInput, match=r"\(r0\) lack outputs .*: `dvc pull sft@r0`"):
        run()
    assert "r0" in of_round(run(rerun=("r0",)))


@pytest.mark.parametrize(
    ("approved", "decided_on", "ends"),
    [(True, 0.4, False), (True, 0.3, True), (False, 0.4, True), (None, 0.4, True)],
)
def test_a_round_whose_gate_failed_ends_unless_it_has_to_read_an_approval(
    rounds: Path, approved: bool | None, decided_on: float, ends: bool
) -> None:
    """decided_on: the number that the person saw; the gate's is 0.4."""
    check = failed_check("evaluate.win_rate", 0.4, ">= 0.5")
    verdict = {"gate": "promote", "round": "r0", "policy": "ask", "passed": False}
    verdict |= {"may_continue": False, "approval": None, "checks": [check]}
    write_json(Path("reports/r0/gate_promote.json"), verdict)
    if approved is not None:
        failed = {"evaluate.win_rate": decided_on}
        decision = {"approved": approved, "by": "Ada", "reason": "seen", "failed": failed}
        write_json(Path("approvals/r0/promote.json"), decision)
    assert to_end(2) == (["r0"] if ends else [])


def test_a_gate_that_failed_has_the_settings_of_its_own_run(rounds: Path) -> None:
    """DVC leaves the entry of the run in which the gate had passed."""
    lock = yaml.safe_load(Path("dvc.lock").read_text())
    lock["stages"]["gate_promote@r0"] = {
        "cmd": "python -m stages.gate",
        "deps": [{"path": "rounds/r0/evaluate/data", "hash": "md5", "md5": "0" * 32}],
        "params": {"params.yaml": {"gates.promote.win_rate": 0.9}},
    }
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    config.write_params(config.resolve(settings=["gates.promote.win_rate=0.55"]))
    assert of_round(run(number=2)) == {"r1"}
    assert params_of("r0").gates.promote.win_rate == 0.55


def test_an_interruption_is_completed_by_the_next_run(rounds: Path) -> None:
    params = Path("params.yaml").read_text()
    history.write(*history.resolve_run(config.KEEP, 2, ()))
    Path("params.yaml").write_text(params)  # as before it was written
    unfinished = [Path("rounds/r0/.params.yaml.0.tmp"), Path(".params.yaml.0.tmp")]
    for path in unfinished:
        path.write_text("half of i")
    assert of_round(run(number=2)) == {"r1"} and ended_names() == {"r0"}
    assert not any(map(Path.exists, unfinished))
