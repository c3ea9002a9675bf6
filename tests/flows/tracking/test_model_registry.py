"""Champion and previous in a real MLflow database, from the files that two rounds leave behind;
gates are the real ones.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from flows import cli
from flows.tracking import model_registry
from flows.tracking.mlflow_store import MlflowStore, MlflowTracker, registry
from flows.tracking.records import read_record
from stages.gate.approvals import Approval, read_rollback, write_approval
from stages.gate.verdict import run_gate
from stages.lib.core.errors import BadInput, GateFailed, RondoError
from stages.lib.core.files import file_hash, stage_dir, write_json, write_text
from stages.lib.core.params import check_params

NOWHERE = "http://127.0.0.1:9"
GOOD = {"win_rate": 0.8, "win_rate_low": 0.7, "win_rate_high": 0.9, "human_nll_rise": 0.5}
GOOD |= {
    "sft": {"repetition_3": 0.0, "eos_rate": 0.7},
    "ppo": {"kl": 5.0, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.9},
}
CHAMPION = {
    "win_rate_champion": 0.57,
    "win_rate_champion_low": 0.51,
    "win_rate_champion_high": 0.63,
}
FIRST = dict.fromkeys(CHAMPION)


def make_round(round_: str, policy: str, evaluate: dict[str, Any], gate: str = "block") -> None:
    """What DVC and the stages leave behind, up to the verdict; `policy` is what its md5 begins
    with.
    """
    write_json(stage_dir(round_, "evaluate") / "metrics.json", GOOD | evaluate)
    write_json(stage_dir(round_, "ppo") / "metrics.json", {"dangers": 0, "policy_update": 12})
    write_json(stage_dir(round_, "replay") / "metrics.json", {"regressed": 0})
    write_json(stage_dir(round_, "capability") / "metrics.json", {"worst_fall": None})
    lock = (
        yaml.safe_load(Path("dvc.lock").read_text())
        if Path("dvc.lock").exists()
        else {"stages": {}}
    )
    for stage, out, md5 in (
        ("ppo", "policy", f"{policy}.dir"),
        ("sft", "model", f"5f7{round_}.dir"),
    ):
        lock["stages"][f"{stage}@{round_}"] = {
            "outs": [{"path": f"rounds/{round_}/{stage}/{out}", "md5": md5}]
        }
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    with suppress(GateFailed):
        run_gate(check_params({"gates": {"promote": {"policy": gate}}}, "test"), "promote", round_)


def mirror(run: str, uri: str, *rounds: str, outcome: str = "ran") -> list[str]:
    """A run of the flow, as far as MLflow is told of it; what it said."""
    said: list[str] = []
    tracker = MlflowTracker(
        run, uri, Path(".rondo").absolute(), {"revision": "c0ffee", "seed": "7"}, said.append
    )
    for round_ in rounds:
        for stage in ("evaluate", "gate_promote"):
            tracker.start(f"{stage}@{round_}")
            tracker.finish("ran" if stage == "evaluate" and outcome == "failed" else outcome)
    tracker.close(True, {"summary.md": "the table"})
    return said


def two_rounds(database: str) -> MlflowClient:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION)
    assert mirror("both", database, "r0", "r1") == []
    return MlflowClient(database)


def held(client: MlflowClient) -> dict[str, str]:
    """Alias -> DVC's md5 of the policy."""
    return {alias: version.tags["md5"] for alias, version in model_registry.holders(client).items()}


def versions(client: MlflowClient) -> list[str]:
    return sorted(
        version.tags["md5"] for version in client.search_model_versions("name = 'rondo-policy'")
    )


def test_a_policy_whose_gate_opened_becomes_champion_with_its_evidence(database: str) -> None:
    client = two_rounds(database)
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    champion, previous = (
        model_registry.holders(client)[alias] for alias in ("champion", "previous")
    )
    wanted = {
        "round": "r1",
        "path": "rounds/r1/ppo/policy",
        "md5": "bbb.dir",
        "md5.sft": "5f7r1.dir",
        "revision": "c0ffee",
        "seed": "7",
    }
    wanted |= {
        "passed": "True",
        "policy": "block",
        "evaluate.win_rate": "0.8",
        "evaluate.win_rate_champion_high": "0.63",
    }
    wanted |= {"evaluate.win_rate_low": "0.7", "evaluate.ppo.kl": "5.0", "ppo.dangers": "0.0"}
    wanted |= {"evaluate.ppo.repetition_3 - evaluate.sft.repetition_3": "0.0"}
    assert champion.tags.items() >= wanted.items()
    assert previous.tags["evaluate.win_rate_champion_low"] == "null"
    assert (
        champion.run_id is not None
        and client.get_run(champion.run_id).data.tags["rondo.address"] == "gate_promote@r1"
    )
    model = client.get_logged_model(champion.source.removeprefix("models:/"))
    assert (model.name, model.params["path"], model.params["step"]) == (
        "r1-ppo",
        "rounds/r1/ppo/policy",
        "12",
    )
    assert model_registry.told(client).splitlines() == [
        f"champion: version 2, r1, gate opened {champion.tags['gate_opened'][:16]}",
        "  win rate against SFT 0.800 [0.700, 0.900]",
        "  win rate against the champion before 0.570 [0.510, 0.630]",
        "  rounds/r1/ppo/policy, md5 bbb.dir, git c0ffee, seed 7",
        f"previous: version 1, r0, gate opened {previous.tags['gate_opened'][:16]}",
        "  win rate against SFT 0.800 [0.700, 0.900]",
        "  win rate against the champion before not measured",
        "  rounds/r0/ppo/policy, md5 aaa.dir, git c0ffee, seed 7",
    ]


def test_the_same_policies_again_change_nothing_in_any_order(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    first = read_record("both", "gate_promote@r0", "ran", {})
    client = two_rounds(database)
    mirror("again", database, "r0", "r1", outcome="unchanged")
    mirror("the first alone", database, "r0")
    MlflowStore(database, None).send(first)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_what_was_cut_off_between_version_and_alias_is_finished_when_sent_again(
    database: str,
) -> None:
    client = two_rounds(database)
    client.set_registered_model_alias("rondo-policy", "champion", "1")
    client.delete_registered_model_alias("rondo-policy", "previous")
    mirror("again", database, "r1")
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_policy_that_nobody_vouches_for_is_not_promoted(database: str) -> None:
    bad = {"win_rate_low": 0.4, **FIRST}
    make_round("r0", "aaa", bad, gate="warn")
    assert Path("gates/r0/promote.ok").exists()
    make_round("r1", "bbb", bad)
    make_round("r2", "ccc", FIRST)  # its verdict is from before a run that failed
    mirror("warned", database, "r0", "r1")
    mirror("failed", database, "r2", outcome="failed")
    client = MlflowClient(database)
    assert held(client) == {"challenger": "bbb.dir"} and versions(client) == ["aaa.dir", "bbb.dir"]
    with pytest.raises(BadInput, match="`warn` is not enough"):
        model_registry.told(client)

    write_approval(
        "r0",
        "promote",
        Approval(approved=False, by="Ada", reason="a hack", failed={"evaluate.win_rate_low": 0.4}),
    )
    make_round("r0", "aaa", bad, gate="ask")
    mirror("refused", database, "r0")
    assert held(client) == {"challenger": "bbb.dir"}


def test_a_challenger_becomes_champion_when_a_person_lets_it_through(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", {"win_rate_low": 0.4, **CHAMPION}, gate="ask")
    mirror("asked", database, "r0")
    mirror("asked", database, "r1", outcome="failed")
    client = MlflowClient(database)
    assert held(client) == {"champion": "aaa.dir", "challenger": "bbb.dir"}
    assert "challenger: version 2, r1, not promoted" in model_registry.told(client)
    write_approval(
        "r1",
        "promote",
        Approval(
            approved=True, by="Ada", reason="read them all", failed={"evaluate.win_rate_low": 0.4}
        ),
    )
    make_round("r1", "bbb", {"win_rate_low": 0.4, **CHAMPION}, gate="ask")
    mirror("approved", database, "r1")
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    assert model_registry.holders(client)["champion"].tags["approval.by"] == "Ada"


def test_a_policy_that_a_person_let_through_is_promoted_with_who_and_why(database: str) -> None:
    write_approval(
        "r0",
        "promote",
        Approval(
            approved=True, by="Ada", reason="read them all", failed={"evaluate.win_rate_low": 0.4}
        ),
    )
    make_round("r0", "aaa", {"win_rate_low": 0.4, **FIRST}, gate="ask")
    mirror("approved", database, "r0")
    client = MlflowClient(database)
    (champion,) = model_registry.holders(client).values()
    told = {
        key: champion.tags[key]
        for key in ("passed", "approval.by", "approval.reason", "evaluate.win_rate_low")
    }
    assert told == {
        "passed": "False",
        "approval.by": "Ada",
        "approval.reason": "read them all",
        "evaluate.win_rate_low": "0.4",
    }
    assert "approved by Ada: read them all" in model_registry.told(client)


def test_what_a_dead_server_missed_is_promoted_later_and_the_last_one_is_champion(
    database: str,
) -> None:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION)
    assert NOWHERE in mirror("offline", NOWHERE, "r0", "r1")[0]
    shutil.rmtree("rounds")  # the records are complete
    unsent = Path(".rondo/unsent.jsonl")
    # gates before evaluations, for which they wait, and r1 before r0
    lines = sorted(
        unsent.read_text().splitlines(),
        key=lambda line: str(json.loads(line)["address"]),
        reverse=True,
    )
    unsent.write_text("".join(line + "\n" for line in lines))
    for _ in range(2):
        MlflowTracker("next", database, Path(".rondo").absolute(), {}, print).close(True, {})
    assert not unsent.exists()
    client = MlflowClient(database)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert model_registry.holders(client)["champion"].version == 1  # r1's came first
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_rollback_stays_and_a_second_one_takes_it_back(database: str) -> None:
    client = two_rounds(database)
    model_registry.roll_back(client, "Ada", "one ending for all")
    assert held(client) == {"champion": "aaa.dir", "previous": "bbb.dir"}
    bad = model_registry.holders(client)["previous"]
    assert (bad.tags["rollback.by"], bad.tags["rollback.reason"]) == ("Ada", "one ending for all")
    assert (
        f"taken back {bad.tags['rollback.at'][:16]} by Ada: one ending for all"
        in model_registry.told(client)
    )
    mirror("again", database, "r0", "r1", outcome="unchanged")
    assert held(client) == {"champion": "aaa.dir", "previous": "bbb.dir"}

    model_registry.roll_back(client, "Bob", "it was the judge")
    assert held(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    model_registry.roll_back(client, "Ada", "it was not")
    make_round("r1", "ccc", CHAMPION)
    mirror("mended", database, "r1")
    assert held(client) == {"champion": "ccc.dir", "previous": "aaa.dir"}
    assert versions(client) == ["aaa.dir", "bbb.dir", "ccc.dir"]


def test_a_rollback_reaches_the_next_round_where_these_are_the_policies_of_this_folder(
    database: str,
) -> None:
    client = two_rounds(database)
    for name in ("r0", "r1"):
        write_text(Path(f"rounds/{name}/ppo/policy/adapter.bin"), name)
    model_registry.roll_back(client, "Ada", "one ending for all")
    word = read_rollback("r1")
    assert word and (word.by, word.reason, word.policy) == (
        "Ada",
        "one ending for all",
        file_hash(Path("rounds/r1/ppo/policy")),
    )
    model_registry.roll_back(client, "Bob", "it was the judge")
    assert read_rollback("r1") is None and read_rollback("r0") is None
    make_round("r1", "ccc", CHAMPION)  # in this folder is another policy by now than the champion
    model_registry.roll_back(client, "Ada", "it was not")
    assert read_rollback("r1") is None


def test_nothing_to_roll_back_to(database: str) -> None:
    with pytest.raises(BadInput, match="MLflow has no champion"):
        model_registry.roll_back(MlflowClient(database), "Ada", "no")
    make_round("r0", "aaa", FIRST)
    mirror("one", database, "r0")
    with pytest.raises(BadInput, match="nothing to roll back to"):
        model_registry.roll_back(MlflowClient(database), "Ada", "no")
    with pytest.raises(BadInput, match="needs --reason"):
        model_registry.roll_back(MlflowClient(database), "Ada", " ")


@pytest.mark.parametrize(
    ("uri", "error", "said"),
    [
        ("off", BadInput, "unset it"),
        (NOWHERE, RondoError, "start it"),
        ("", BadInput, "`rondo run`"),
    ],
)
def test_without_an_mlflow_the_next_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, error: type[RondoError], said: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(
        "flows.tracking.mlflow_store.MLFLOW_URL", NOWHERE
    )  # a server may run on this machine
    with pytest.raises(error, match=said), registry(tmp_path) as client:
        model_registry.told(client)
    assert not (tmp_path / "mlflow.db").exists()


def test_the_command(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    two_rounds(database)
    capsys.readouterr()

    def rondo(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["promote", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    code, out, _ = rondo()
    assert (
        code == 0 and out.startswith("champion: version 2, r1") and "previous: version 1, r0" in out
    )
    assert rondo("--rollback")[0] == rondo("--reason", "why")[0] == 2
    code, out, _ = rondo("--rollback", "--reason", "one ending for all", "--by", "Ada")
    assert (
        code == 0
        and out.startswith("champion: version 1, r0")
        and "by Ada: one ending for all" in out
    )
    Path(".rondo/unsent.jsonl").write_text("{}")
    assert "waits to be sent" in rondo()[1]
