"""`rondo promote`: a person chooses the champion, in a real MLflow database."""

from pathlib import Path
from typing import Protocol

import pytest
from mlflow import MlflowClient

from flows import cli
from flows.tracking import model_registry
from flows.tracking.mlflow_store import registry
from stages.gate.approvals import read_rollback, rollback_path
from stages.gate.champion import main as champion_stage
from stages.lib.core.champion import load_champion
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import file_hash
from stages.lib.core.params import load_params
from tests.flows.tracking.promotions import (
    CHAMPION,
    FIRST,
    PROJECT,
    TRIAL,
    aliases,
    make_round,
    mirror,
    two_rounds,
    versions,
)
from tests.servers import NOWHERE


class Rondo(Protocol):
    def __call__(self, *arguments: str) -> tuple[int, str, str]: ...


@pytest.fixture
def promote(capsys: pytest.CaptureFixture[str]) -> Rondo:
    """The command `rondo promote`: its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["promote", *arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_a_person_makes_a_challenger_champion(database: str, promote: Rondo) -> None:
    make_round("r0", "aaa", FIRST)
    mirror("first", database, "r0", **PROJECT)
    make_round("r0", "bbb", FIRST)
    mirror("trial", database, "r0", **TRIAL)
    client = MlflowClient(database)
    for version, reason, message in (
        (2, " ", "--reason is empty"),
        (3, "better", "has no version 3; versions: 1, 2"),
        (1, "better", "version 1 of rondo-policy is the champion already"),
    ):
        with pytest.raises(BadInput, match=message):
            model_registry.promote_by_hand(client, version, "Ada", reason)
    code, out, _ = promote()
    assert code == 0
    assert out.startswith("champion: version 1, r0") and "challenger: version 2, r0" in out
    code, out, _ = promote("2", "--reason", "our own prompts", "--by", "Ada")
    assert code == 0 and "by Ada: our own prompts" in out
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    assert "--rollback takes no VERSION" in promote("1", "--rollback", "--reason", "no")[2]
    assert promote("--rollback")[0] == promote("--reason", "why")[0] == 2


def test_a_rollback_stays_and_a_second_one_undoes_it(database: str, promote: Rondo) -> None:
    client = two_rounds(database)
    code, out, _ = promote("--rollback", "--reason", "one ending for all", "--by", "Ada")
    assert code == 0
    assert out.startswith("champion: version 1, r0") and "by Ada: one ending for all" in out
    assert aliases(client) == {"champion": "aaa.dir", "previous": "bbb.dir"}
    tags = model_registry.versions_by_alias(client)["previous"].tags
    assert (tags["rollback.by"], tags["rollback.reason"]) == ("Ada", "one ending for all")
    line = f"rolled back {tags['rollback.at'][:16]} by Ada: one ending for all"
    assert line in model_registry.describe(client)
    mirror("again", database, "r0", "r1", outcome="unchanged")
    assert aliases(client) == {"champion": "aaa.dir", "previous": "bbb.dir"}

    model_registry.roll_back(client, "Bob", "it was the judge")
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    model_registry.roll_back(client, "Ada", "it was not")
    make_round("r1", "ccc", CHAMPION)
    mirror("improved", database, "r1")
    assert aliases(client) == {"champion": "ccc.dir", "previous": "aaa.dir"}
    assert versions(client) == ["aaa.dir", "bbb.dir", "ccc.dir"]


def test_a_rollback_reaches_the_next_round(database: str) -> None:
    client = two_rounds(database)
    model_registry.roll_back(client, "Ada", "one ending for all")
    rollback = read_rollback("r1")
    assert rollback and (rollback.by, rollback.reason, rollback.policy) == (
        "Ada",
        "one ending for all",
        file_hash(Path("rounds/r1/ppo/policy")),
    )
    model_registry.roll_back(client, "Bob", "it was the judge")
    assert read_rollback("r1") is None and read_rollback("r0") is None
    # chosen by its version, it is champion of later rounds again too
    model_registry.roll_back(client, "Ada", "it was not")
    assert read_rollback("r1")
    model_registry.promote_by_hand(client, 2, "Bob", "it was the judge")
    assert read_rollback("r1") is None
    make_round("r1", "ccc", CHAMPION)  # another policy, which no person has seen before
    model_registry.roll_back(client, "Ada", "it was not")
    assert next_champion("r2") == "r0"


def next_champion(round_: str) -> str | None:
    """The round of the policy with which this round's is compared, by the stage of the DAG."""
    champion_stage(load_params(), round_)
    champion = load_champion(round_)
    return champion.round if champion else None


def test_the_next_round_has_the_champion_that_a_person_promoted(database: str) -> None:
    client = two_rounds(database)
    assert next_champion("r2") == "r1"
    model_registry.promote_by_hand(client, 1, "Ada", "our own prompts")
    assert next_champion("r2") == "r0"
    # the alias follows the files: no record of the other policy moves it back
    mirror("again", database, "r0", "r1", outcome="unchanged")
    assert aliases(client) == {"champion": "aaa.dir", "previous": "bbb.dir"}

    make_round("r2", "ccc", FIRST | {"win_rate_low": 0.4})
    assert next_champion("r2") == "r0"  # and champion.json of r2 is that of the stage
    mirror("third", database, "r2", outcome="failed")
    assert (next_champion("r3"), aliases(client)["challenger"]) == ("r0", "ccc.dir")
    model_registry.promote_by_hand(client, 3, "Ada", "read them all")
    assert next_champion("r3") == "r2"
    mirror("later", database, "r1", "r2", outcome="unchanged")
    assert aliases(client) == {"champion": "ccc.dir", "previous": "aaa.dir"}
    make_round("r2", "ddd", FIRST | {"win_rate_low": 0.4})  # trained anew
    assert next_champion("r2") == "r0"
    assert next_champion("r3") == "r0"


def test_a_version_that_later_rounds_could_not_use_is_refused(
    database: str, promote: Rondo
) -> None:
    client = two_rounds(database)
    before = aliases(client)
    make_round("r0", "ccc", FIRST)  # r0 of version 1 is in another commit
    for arguments in (["1"], ["--rollback"]):
        code, _, message = promote(*arguments, "--reason", "our own prompts")
        assert code == 2
        assert "version 1 of rondo-policy is not in this folder: rounds/r0/ppo/policy" in message
        assert "aaa.dir" in message and "`dvc checkout`, then promote it" in message
    assert aliases(client) == before and not rollback_path("r1").exists()


def test_nothing_to_roll_back_to(database: str) -> None:
    with pytest.raises(BadInput, match="MLflow has no champion"):
        model_registry.roll_back(MlflowClient(database), "Ada", "no")
    make_round("r0", "aaa", FIRST)
    mirror("one", database, "r0")
    with pytest.raises(BadInput, match="nothing to roll back to"):
        model_registry.roll_back(MlflowClient(database), "Ada", "no")
    with pytest.raises(BadInput, match="--reason is empty"):
        model_registry.roll_back(MlflowClient(database), "Ada", " ")


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("off", BadInput, "unset it"),
        (NOWHERE, RondoError, "start it"),
        ("", BadInput, "`rondo run`"),
    ],
)
def test_without_mlflow_the_error_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, error: type[RondoError], message: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(error, match=message), registry(tmp_path) as client:
        model_registry.describe(client)
    assert not (tmp_path / "mlflow.db").exists()
