"""What MLflow does must neither stop nor hold up a run. Without a server: a database, and one that
does not answer.
"""

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from flows.core.run_locks import hold_run_lock
from flows.execution.meter import Meter
from flows.tracking.mlflow_store import MlflowStore, check_address, registry, store_uri
from flows.tracking.mlflow_tracker import MlflowTracker, record_path, save
from flows.tracking.records import Record
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_text
from tests.flows.tracking.tracks import states, track
from tests.paths import ROOT
from tests.servers import NOWHERE

NAN_STEPS = '{"step": 1, "grad_norm": NaN, "loss": 2.0}\n{"step": 2, "grad_norm": Infinity}\n'


@pytest.fixture
def database(empty_tables: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_tables, tmp_path / 'mlflow.db')}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_stage_that_diverged_and_more_tags_than_mlflow_takes_in_one_request(
    folder: Path, database: str
) -> None:
    write_text(folder / "rounds/r0/sft/metrics.jsonl", NAN_STEPS)
    tags = {f"tag {number}": str(number) for number in range(150)}
    assert track(database, folder, "sft@r0", tags=tags) == []
    client = MlflowClient(database)
    (run,) = client.search_runs(["1"], "tags.`rondo.address` = 'sft@r0'")
    values = [point.value for point in client.get_metric_history(run.info.run_id, "grad_norm")]
    assert math.isnan(values[0]) and values[1] > 1e300  # MLflow stores the largest float
    assert run.data.metrics["loss"] == 2.0
    assert run.data.tags.items() >= tags.items()


def test_records_that_mlflow_never_takes_hold_up_no_other(folder: Path, database: str) -> None:
    home = folder / ".rondo"
    save(home, Record(run="bad", started=0, ended=0, status="FAILED", final={"a key!": 1.0}))
    write_text(record_path(home, "bad", "sft@r0"), '{"run": "r')
    *messages, last = track(database, folder, "assets", run="second")
    assert messages and len({*messages}) == 1 and "does not take 2 records" in messages[0]
    assert "bad/pipeline.json" in messages[0] and "a key!" in messages[0]
    assert "MLflow lacks records or models of 1 runs" in last
    assert states(database)["second"] == states(database)["assets"] == "FAILED"


def test_an_experiment_that_was_deleted_in_the_ui_is_restored(folder: Path, database: str) -> None:
    track(database, folder, run="first")
    client = MlflowClient(database)
    client.delete_experiment("1")
    assert track(database, folder, run="second") == []
    runs = client.search_runs(["1"], run_view_type=ViewType.ACTIVE_ONLY)
    assert {run.info.run_name for run in runs} >= {"second"}


def test_a_run_that_waits_goes_on_and_ends(folder: Path, database: str) -> None:
    def tracker() -> MlflowTracker:
        return MlflowTracker("run", database, folder / ".rondo", {}, pytest.fail)

    first, second, third = tracker(), tracker(), tracker()
    first.begin()
    first.wait()
    assert states(database) == {"run": "SCHEDULED"}
    second.begin()
    second.flush()
    assert states(database) == {"run": "RUNNING"}
    second.close("KILLED", {})
    assert states(database) == {"run": "KILLED"}
    third.begin()  # Retry
    third.flush()
    assert states(database) == {"run": "RUNNING"}
    third.close("FINISHED", {})
    assert states(database) == {"run": "FINISHED"}


def test_the_next_run_ends_the_runs_that_were_killed(folder: Path, database: str) -> None:
    home = folder / ".rondo"

    def begin(run: str) -> MlflowTracker:
        tracker = MlflowTracker(run, database, home, {}, pytest.fail)
        tracker.begin()
        tracker.flush()
        return tracker

    write_text(folder / "rounds/r0/sft/metrics.jsonl", NAN_STEPS)
    killed, meter = begin("20261123-killed"), Meter()
    meter.began = 0.0
    killed.start("sft@r0", meter)
    killed.flush()
    begin("20261123-waits").wait()
    begin("20261123-done").close("FINISHED", {})
    hold_run_lock(home / "runs/alive-id.json")
    begin("20261123-alive")
    begin("20261124-next")
    assert states(database) == {
        "20261123-killed": "KILLED",
        "sft@r0": "KILLED",
        "20261123-waits": "SCHEDULED",
        "20261123-done": "FINISHED",
        "20261123-alive": "RUNNING",
        "20261124-next": "RUNNING",
    }
    begin("20261123-killed")  # Retry
    assert states(database)["20261123-killed"] == "RUNNING"


@pytest.fixture
def silent_server() -> Iterator[tuple[str, Event]]:
    """Accepts requests, and answers none before the event is set."""
    answer = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the first request: whether this MLflow has LoggedModels
            answer.wait()
            self.send_error(503)

        do_GET = do_POST

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://Ada:secret@127.0.0.1:{server.server_port}", answer
    answer.set()
    server.shutdown()
    server.server_close()


def test_a_stage_does_not_wait_for_mlflow(
    folder: Path, silent_server: tuple[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, answer = silent_server
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    messages: list[str] = []
    tracker = MlflowTracker("run", uri, folder / ".rondo", {}, messages.append)
    tracker.begin()
    tracker.start("sft@r0", Meter())
    tracker.finish("failed")
    # All calls returned while the first request is still waiting for its answer.
    assert messages == []
    assert len(list(record_path(folder / ".rondo", "run").parent.glob("*.json"))) == 2
    answer.set()
    tracker.close("FAILED", {})
    assert "failed" in messages[0] and "of 1 runs" in messages[-1]
    assert not any("secret" in message for message in messages)


def test_a_stage_has_the_time_in_which_it_computed(folder: Path, database: str) -> None:
    """Not that of its first and last metric, and no time in which people let it wait."""

    def stage(address: str, outcome: str, began: float | None, seconds: float) -> list[object]:
        """Status, start and end in seconds since the epoch, as MLflow has them."""
        tracker, meter = MlflowTracker("run", database, folder / ".rondo", {}, print), Meter()
        meter.began, meter.seconds = began, seconds
        tracker.start(address, meter)
        tracker.flush()
        tracker.finish(outcome)
        tracker.flush()
        (run,) = MlflowClient(database).search_runs(["1"], f"tags.`rondo.address` = '{address}'")
        return [run.info.status, run.info.start_time / 1000, run.info.end_time / 1000]

    write_text(folder / "rounds/r0/battery/metrics.jsonl", NAN_STEPS)
    times = '{"step": -1, "time": 1090}\n{"step": 1, "time": 1100}\n{"step": 2, "time": 1200}\n'
    write_text(folder / ".rondo/work/r0/battery/clock.jsonl", times)
    assert stage("battery@r0", "ran", 1000.0, 780.0) == ["FINISHED", 1000.0, 1780.0]
    assert stage("battery@r0", "unchanged", None, 0.0) == ["FINISHED", 1000.0, 1780.0]
    assert stage("replay@r0", "ran", 1780.0, 793.5) == ["FINISHED", 1780.0, 2573.5]
    assert stage("gate_sft@r0", "failed", 2000.0, 3.0) == ["FAILED", 2000.0, 2003.0]
    # a person has decided after an hour
    assert stage("gate_sft@r0", "ran", 5600.0, 4.0) == ["FINISHED", 2000.0, 2004.0]
    assert stage("reward@r0", "cancelled", 6000.0, 60.0) == ["KILLED", 6000.0, 6060.0]


@pytest.mark.parametrize("uri", ["./mlruns", "file:/mlruns"])
def test_an_address_that_mlflow_refuses_is_an_error_of_the_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    first, last = track(uri, folder, "assets")
    for message in (first, last):
        assert "`mlflow migrate-filestore`" in message  # what MLflow says, to its end
        assert "set MLFLOW_TRACKING_URI to an MLflow server (http://...) or a database" in message
    assert "cannot be sent to this address" in last and "next run" not in last
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(BadInput, match="set MLFLOW_TRACKING_URI to"), registry(folder / ".rondo"):
        pass
    with pytest.raises(BadInput, match="set MLFLOW_TRACKING_URI to"):
        check_address(uri)
    for fine in ("off", NOWHERE, "sqlite:///none.db", "postgresql+psycopg://127.0.0.1:9/none"):
        check_address(fine)  # a server that is away may come back


@pytest.mark.parametrize(
    ("address", "absolute"),
    [
        ("sqlite:///tracking.db", "sqlite:///{}/tracking.db"),
        ("sqlite:///./a/b.db?timeout=5", "sqlite:///{}/a/b.db?timeout=5"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("databricks", "databricks"),
    ],
)
def test_a_relative_address_is_one_of_the_project_in_every_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str, absolute: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    workspace = folder / ".rondo/workspaces/run"
    workspace.mkdir(parents=True)
    monkeypatch.chdir(workspace)
    assert store_uri(folder / ".rondo") == absolute.format(folder)


@pytest.mark.parametrize("name", ["50%25", "a?x#b", "ü %2F"])
def test_a_folder_with_signs_of_addresses_in_its_name_has_its_own_database(
    folder: Path, name: str
) -> None:
    home = folder / name / ".rondo"
    home.mkdir(parents=True)
    store = MlflowStore(store_uri(home))
    run = store.run_id("run", "", 0)
    store.client.log_text(run, "text", "a.txt")
    assert (home / "mlflow.db").exists() and [path.name for path in folder.iterdir()] == [name]
    (text,) = folder.rglob("a.txt")
    assert text.is_relative_to(home / "mlartifacts")
    if name == "ü %2F":
        command = [sys.executable, "-m", "flows.tracking.mlflow_server"]
        subprocess.run([*command, str(home / "new.db"), "--version"], cwd=ROOT, check=True)
        assert (home / "new.db").exists()
