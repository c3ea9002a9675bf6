"""MLflow's own server: models loaded from it alone, records that it refuses and then takes, and the
tables of its database.
"""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from flows.tracking.mlflow_store import check_address, connect
from flows.tracking.mlflow_tracker import send_all
from stages.evaluate.evaluator import Evaluator
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir, write_json
from stages.lib.core.params import check_params
from stages.lib.core.params.tracking import Upload
from stages.lib.lm.scoring import RewardScorer
from tests.faults.servers import MlflowServer, mlflow_server, refusing_proxy
from tests.flows.tracking.test_models import ALL, MADE, models_of
from tests.flows.tracking.tracks import states, track
from tests.paths import ROOT
from tests.stages.conftest import SMALL

record = partial(track, outcome="ran", upload=tuple(Upload))
SCRIPT = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
policy = mlflow.pyfunc.load_model("models:/rondo-policy@champion")
reward = mlflow.pyfunc.load_model(sys.argv[2])
result = {
    "texts": policy.predict(policy.input_example),
    "second": policy.predict(policy.input_example, params={"seed": 1}),
    "other": policy.predict([{"prompt": "A walk"}], params={"max_new_tokens": 3}),
    "scores": reward.predict(json.load(sys.stdin)),
    "code": __import__("stages").__file__,
}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_tables: Path) -> Iterator[MlflowServer]:
    """Started once, since its start takes long; tests differ by the names of their runs."""
    with mlflow_server(tmp_path_factory.mktemp("server"), empty_tables) as server:
        server.start()
        yield server


def test_the_server_alone_gives_the_champion_and_the_reward_model(
    models: Path, server: MlflowServer, tmp_path: Path
) -> None:
    """Recorded in the database, without the server; loaded by a process that has no project."""
    params, database = check_params(SMALL, "test"), f"sqlite:///{server.database}"
    stages = (*MADE, "evaluate@r0", "gate_promote@r0")
    assert record(database, tmp_path, *stages, run="first") == []
    logged = models_of(database, "first")
    assert {name: model.status for name, model in logged.items()} == dict.fromkeys(ALL, "READY")
    write_json(stage_dir("r0", "champion") / "champion.json", {"round": None})
    evaluator = Evaluator(params, "r0")
    expected = [
        [sample.text for sample in evaluator.sample(evaluator.load_ppo(), number)]
        for number in (0, 1)
    ]
    pairs = read_jsonl(stage_dir("r0", "prepare") / "data/pairs_eval.jsonl", "")
    rows = [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in pairs]
    scorer = RewardScorer(stage_dir("r0", "reward") / "model", params)
    scores = scorer(*([row[name] for row in rows] for name in ("prompt", "response")))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    models.rename(tmp_path / "moved")  # no path of the recording machine is of use
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, server.url, logged["r0-reward"].model_uri],
        cwd=elsewhere,
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [result["texts"], result["second"]] == expected
    assert expected[0] != expected[1]
    assert len(result["other"]) == 1
    assert result["scores"] == pytest.approx(scores, abs=1e-6)
    assert not result["code"].startswith(str(ROOT))


def test_an_upload_that_an_outage_interrupts_is_completed_by_a_sync(
    models: Path, server: MlflowServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    refused = {"/mlflow-artifacts/": (500, "no room")}
    with refusing_proxy(server.url, refused) as uri:
        first, last = record(uri, home.parent, "sft@r0", run="cut")
        assert "failed" in first and "`rondo sync` sends the rest" in last
        assert models_of(server.url, "cut")["r0-sft"].status == "PENDING"
        refused.clear()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert list(send_all(home, pytest.fail)) == ["cut: files of r0-sft"]
        assert list(send_all(home, pytest.fail)) == []
    assert models_of(server.url, "cut")["r0-sft"].status == "READY"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_records_that_a_server_refuses_for_lack_of_rights_are_sent_when_it_takes_them(
    folder: Path, server: MlflowServer
) -> None:
    """As with an expired token or a limit: a server answers reads, and 403 or 429 to writes."""
    expired = '{"error_code": "PERMISSION_DENIED", "message": "Token expired."}'
    refused = {"log-batch": (403, expired)}
    with refusing_proxy(server.url, refused) as uri:
        for answer in ((403, expired), (413, "<html>"), (429, "<html>")):
            refused["log-batch"] = answer
            messages = track(uri, folder, "battery@r0", "replay@r0", run="refused")
            assert len(messages) == 2 and "`rondo sync` sends the rest" in messages[-1]
        refused.clear()
        assert track(uri, folder, run="next") == []
    names = ("refused", "battery@r0", "replay@r0", "next")
    assert states(server.url).items() >= dict.fromkeys(names, "FAILED").items()


def test_a_server_older_than_3_is_named_and_gets_the_records_after_its_update(
    folder: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"logged-models": (404, "<!doctype html>\n<title>404 Not Found</title>")}
    with refusing_proxy(server.url, refused) as uri:
        first, last = track(uri, folder, "assets", run="old")
        for message in (first, last):
            assert "Rondo needs MLflow 3. Next: update the server" in message
        assert "the next run" not in last
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(BadInput, match="needs MLflow 3"):
            list(send_all(folder / ".rondo", pytest.fail))
        with pytest.raises(BadInput, match="needs MLflow 3"):
            check_address(uri)
        refused.clear()
        check_address(uri)
        assert list(send_all(folder / ".rondo", pytest.fail)) == ["old: 2 records"]


def tables(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {name for [name] in connection.execute("select name from sqlite_master")}


@pytest.mark.parametrize("maker", ["client", "server"])
def test_the_tables_are_made_beside_the_database(
    maker: str, folder: Path, empty_tables: Path
) -> None:
    database, unfinished = folder / "mlflow.db", folder / "mlflow.db.unfinished"
    unfinished.write_text("of a killed process")
    if maker == "client":
        connect(f"sqlite:///{database}")
    else:
        command = [sys.executable, "-m", "flows.tracking.mlflow_server", str(database), "--version"]
        subprocess.run(command, cwd=ROOT, check=True)
    assert tables(database) == tables(empty_tables)
    assert not unfinished.exists()
