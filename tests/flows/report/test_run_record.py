"""What is recorded of runs, and how the list of all runs shows it."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.core.run_locks import RUNS, hold_run_lock
from flows.report import run_pages, run_record
from flows.report.run_record import State
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params import Params

RUN, FLOW_RUN = "20261129-214513-71e0f8ea", "71e0f8ea-1111-2222-3333-444444444444"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the project in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".rondo"


@pytest.fixture
def alive(home: Path) -> None:
    """The process of the run lives: it is this one."""
    hold_run_lock(home / RUNS / f"{FLOW_RUN}.json")


def recorded(
    home: Path, body: Callable[[], None], preset: str = "keep", **settings: object
) -> None:
    params = Params.model_validate(settings)
    with run_record.recorded(home, RUN, preset, params, False, FLOW_RUN, print):
        run_record.set_up(home, RUN, ["r0"], "http://m/#/experiments/7/runs/ab?workflowType=x")
        body()


def visit(home: Path, *addresses: str) -> None:
    for address in addresses:
        run_record.begin_stage(home, RUN, address)


def verdict(gate: str, **values: object) -> None:
    """passed, unless the values are others."""
    whole = {
        "gate": gate,
        "round": "r0",
        "policy": "block",
        "passed": True,
        "may_continue": True,
        "approval": None,
        "checks": [],
    }
    write_json(Path(f"reports/r0/gate_{gate}.json"), whole | values)


def evaluated() -> None:
    rate = {"win_rate": 0.75, "win_rate_low": 0.625, "win_rate_high": 0.875}
    write_json(stage_dir("r0", "evaluate") / "metrics.json", rate | {"ppo": {"kl": 6.803}})


def row(home: Path) -> run_pages.Row:
    [only] = run_pages.rows(home)
    return only


def outcomes(home: Path) -> list[str]:
    return [how for *_, how in row(home).gates]


def test_a_run_that_completes(home: Path) -> None:
    def body() -> None:
        verdict("sft")
        visit(home, "sft@r0", "gate_sft@r0", "ppo@r0")
        assert outcomes(home) == ["passed", "not reached", "not reached"]
        evaluated()
        verdict("reward", passed=False, policy="warn")
        approval = {"approved": True, "by": "Ada", "reason": "r", "failed": {}}
        verdict("promote", passed=False, approval=approval)
        visit(home, "gate_reward@r0", "evaluate@r0", "gate_promote@r0")
        run_record.end(home, RUN, State.completed)

    recorded(home, body, preset="tiny", seed=8)
    shown = row(home)
    assert (shown.state, shown.state_class, shown.round) == ("completed", "warn", "r0")
    assert outcomes(home) == ["passed", "warned", "approved"]
    assert (shown.win_rate, shown.kl) == ("0.750 [0.625, 0.875]", "6.80")
    assert shown.preset == "tiny" and "seed=8" in shown.record.changes


def test_numbers_of_an_earlier_run_are_not_those_of_a_run_that_a_gate_stopped(home: Path) -> None:
    evaluated()
    verdict("reward")

    def body() -> None:
        visit(home, "sft@r0", "gate_sft@r0")
        verdict("sft", passed=False, may_continue=False)
        run_record.end(home, RUN, State.failed)

    recorded(home, body)
    shown = row(home)
    assert (shown.state, shown.state_class) == ("GateFailed at gate_sft@r0", "bad")
    assert outcomes(home) == ["failed", "not reached", "not reached"]
    assert (shown.win_rate, shown.kl) == ("-", "-")


def test_a_stage_that_fails(home: Path) -> None:
    evaluated()  # of an earlier run

    def body() -> None:
        visit(home, "evaluate@r0")
        run_record.end(home, RUN, State.failed)
        raise ValueError

    with pytest.raises(ValueError):
        recorded(home, body)
    assert (row(home).state, row(home).win_rate) == ("failed at evaluate@r0", "-")


def test_an_error_before_any_stage(home: Path) -> None:
    def body() -> None:
        raise ValueError("not committed: http://ada:secret@host/\nsecond line")

    with pytest.raises(ValueError):
        recorded(home, body)
    assert row(home).state == "failed"
    assert row(home).record.reason == "ValueError: not committed: http://host/"


def test_an_interrupted_run_and_one_that_waits(home: Path) -> None:
    def interrupted() -> None:
        visit(home, "sft@r0")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded(home, interrupted)
    assert row(home).state == "interrupted at sft@r0"

    def waiting() -> None:
        visit(home, "gate_sft@r0")
        verdict("sft", passed=False, may_continue=False, policy="ask")
        run_record.end(home, RUN, State.waiting)
        raise KeyboardInterrupt  # as Prefect's Pause, it is no Exception

    with pytest.raises(KeyboardInterrupt):
        recorded(home, waiting)
    assert row(home).state == "waits for a decision at gate_sft@r0"
    assert outcomes(home)[0] == "failed"


def test_a_run_that_is_killed_does_not_run(home: Path) -> None:
    """It writes nothing: the lock of its process is free."""

    def body() -> None:
        visit(home, "sft@r0")
        assert row(home).state == "interrupted at sft@r0"
        hold_run_lock(home / RUNS / f"{FLOW_RUN}.json")
        assert row(home).state == "runs sft@r0"

    recorded(home, body)


def test_the_progress_of_a_running_stage(home: Path, alive: None) -> None:
    def body() -> None:
        write_text(stage_dir("r0", "sft") / "metrics.jsonl", '{"step": 9, "loss": 9.0}\n')
        os.utime(stage_dir("r0", "sft") / "metrics.jsonl", (0, time.time() - 9))
        visit(home, "sft@r0")
        assert row(home).state == "runs sft@r0"  # the file is that of an earlier run
        write_text(stage_dir("r0", "sft") / "metrics.jsonl", '{"step": 2, "loss": 1.5}\n')
        assert row(home).state == "runs sft@r0: step 2, loss 1.5"

    recorded(home, body)


def test_a_run_that_begins_again_keeps_its_settings_and_its_start(home: Path) -> None:
    recorded(home, lambda: visit(home, "sft@r0"), preset="tiny", seed=8)
    first = row(home).record
    time.sleep(0.01)
    recorded(home, lambda: run_record.end(home, RUN, State.completed))
    again = row(home).record
    assert (again.preset, again.changes, again.started) == ("tiny", first.changes, first.started)
    assert again.seconds > first.seconds and again.state == State.completed


def test_keep_names_the_nearest_preset(home: Path) -> None:
    recorded(home, lambda: None, seed=8)
    assert (row(home).preset, row(home).record.changes) == ("keep (default)", ["seed=8"])


def test_pages_are_kept_of_the_rounds_of_the_run_alone(home: Path) -> None:
    for name in ("report.html", "samples.html", "summary.md", "sweep-1.md", "r0/data.html"):
        write_text(Path("reports") / name, f"first {name}")
    write_text(Path("reports/r0/gate_sft.json"), "{}")
    write_text(Path("reports/r7/data.html"), "of another run")
    run_record.keep_pages(home, RUN, ["r0"])
    kept = run_record.pages(home / "reports" / RUN)
    assert [*kept] == ["r0/data.html", "report.html", "samples.html", "summary.md"]
    Path("reports/samples.html").unlink()
    write_text(Path("reports/report.html"), "second")
    run_record.keep_pages(home, RUN, ["r0"])
    kept = run_record.pages(home / "reports" / RUN)
    assert [*kept] == ["r0/data.html", "report.html", "summary.md"]
    assert kept["report.html"].read_text() == "second"


def test_the_addresses_of_a_runs_pages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(home, lambda: run_record.end(home, RUN, State.completed))
    assert row(home).links.report is None
    write_text(Path("reports/report.html"), "")
    run_record.keep_pages(home, RUN, ["r0"])
    assert run_pages.addresses_here() == run_pages.Addresses(
        runs="http://127.0.0.1:4200/rondo/runs",
        report=f"http://127.0.0.1:4200/rondo/report/{RUN}/report.html",
        prefect=f"http://127.0.0.1:4200/runs/flow-run/{FLOW_RUN}",
        mlflow="http://127.0.0.1:5000/#/experiments/7/runs/ab?workflowType=machine_learning",
        experiment="http://127.0.0.1:5000/#/experiments/7/runs?workflowType=machine_learning",
    )
    report = row(home).links.report
    assert run_pages.served_report(home, RUN) == report
    monkeypatch.setenv("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
    assert run_pages.served_report(home, RUN) is None  # this server ends with the run
    monkeypatch.delenv("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE")
    monkeypatch.setenv("PREFECT_API_URL", "http://team.example:4200/api")
    recorded(home, lambda: run_record.end(home, RUN, State.completed))
    assert run_pages.served_report(home, RUN) is None  # nor has a team's server these pages
    assert row(home).links.prefect == f"http://team.example:4200/runs/flow-run/{FLOW_RUN}"


def test_the_text_fits_a_terminal_and_names_the_newest_runs(home: Path) -> None:
    assert run_pages.text(home) == ""
    for number in range(12):
        name = f"{RUN}.{number}"
        params = Params.model_validate({"seed": 8, "sft": {"max_steps": 3}})
        with run_record.recorded(home, name, "keep", params, True, FLOW_RUN, print):
            run_record.set_up(home, name, ["r0", "r1"], None)
            run_record.begin_stage(home, name, "gate_promote@r0")
            verdict("promote", passed=False, may_continue=False)
            run_record.end(home, name, State.failed)
    text = run_pages.text(home)
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(rf"^{RUN}\.(\d+) ", text, re.M) == [str(n) for n in range(11, 1, -1)]
    assert "newest 10 of 12" in text and "after `rondo up`" in text
    assert "GateFailed at gate_promote@r0" in text and "seed=8" in text
    assert "r0 of 2 rounds: SFT not reached, reward model not reached, policy failed" in (
        " ".join(text.split())
    )


def test_the_page_escapes_texts(home: Path) -> None:
    params = Params.model_validate({"assets": {"model": "<script>alert(1)</script>"}})
    with run_record.recorded(home, RUN, "keep", params, False, FLOW_RUN, print):
        run_record.end(home, RUN, State.completed)
    page = run_pages.page(home)
    assert "<script>" not in page and "assets.model=&lt;script&gt;" in page
    assert 'http-equiv="refresh"' not in page  # nothing runs


def test_a_damaged_record_is_left_out(home: Path) -> None:
    recorded(home, lambda: run_record.end(home, RUN, State.completed))
    write_text(home / "reports/other/run.json", '{"run": ')
    assert row(home).record.run == RUN
