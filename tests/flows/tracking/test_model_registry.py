"""Champion and previous in a real MLflow database, from the files of two rounds and real gates."""

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
from flows.tracking.mlflow_store import MlflowStore, registry
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.outbox import Outbox
from flows.tracking.records import Record, read_record
from stages.gate.approvals import Approval, read_rollback, write_approval
from stages.gate.verdict import run_gate
from stages.lib.core.errors import BadInput, GateFailed, RondoError
from stages.lib.core.files import file_hash, stage_dir, write_json, write_text
from stages.lib.core.params import check_params
from tests.servers import NOWHERE

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


PROJECT = {"project": "p", "isolated": "False"}
TRIAL = {"project": "p", "isolated": "True"}
OTHER_PROJECT = {"project": "q", "isolated": "False"}


def make_round(
    round_: str, policy: str, evaluate: dict[str, Any], gate: str = "block", rival: str = ""
) -> None:
    """Write the files of DVC and the stages, up to the verdict.

    policy: its md5 less `.dir`. rival: the round of the champion with which it was compared.
    """
    write_json(stage_dir(round_, "champion") / "champion.json", {"round": rival or None})
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


def mirror(run: str, uri: str, *rounds: str, outcome: str = "ran", **others: str) -> list[str]:
    """Send the gates of `rounds` to MLflow, as a pipeline run does; returns the messages.

    others: tags of the run besides revision and seed.
    """
    messages: list[str] = []
    tags = {"revision": "c0ffee", "seed": "7", **others}
    tracker = MlflowTracker(run, uri, Path(".rondo").absolute(), tags, messages.append)
    for round_ in rounds:
        for stage in ("evaluate", "gate_promote"):
            tracker.start(f"{stage}@{round_}")
            tracker.finish("ran" if stage == "evaluate" and outcome == "failed" else outcome)
    tracker.close(True, {"summary.md": "the table"})
    return messages


def two_rounds(database: str) -> MlflowClient:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION)
    assert mirror("both", database, "r0", "r1") == []
    return MlflowClient(database)


def aliases(client: MlflowClient) -> dict[str, str]:
    """Alias -> DVC's md5 of the policy."""
    by_alias = model_registry.versions_by_alias(client)
    return {alias: version.tags["md5"] for alias, version in by_alias.items()}


def versions(client: MlflowClient) -> list[str]:
    return sorted(
        version.tags["md5"] for version in client.search_model_versions("name = 'rondo-policy'")
    )


def test_a_policy_whose_gate_passed_becomes_champion_with_its_evidence(database: str) -> None:
    client = two_rounds(database)
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    champion, previous = (
        model_registry.versions_by_alias(client)[alias] for alias in ("champion", "previous")
    )
    tags = {
        "round": "r1",
        "path": "rounds/r1/ppo/policy",
        "md5": "bbb.dir",
        "md5.sft": "5f7r1.dir",
        "revision": "c0ffee",
        "seed": "7",
    }
    tags |= {
        "passed": "True",
        "policy": "block",
        "evaluate.win_rate": "0.8",
        "evaluate.win_rate_champion_high": "0.63",
    }
    tags |= {"evaluate.win_rate_low": "0.7", "evaluate.ppo.kl": "5.0", "ppo.dangers": "0.0"}
    tags |= {"evaluate.ppo.repetition_3 - evaluate.sft.repetition_3": "0.0"}
    assert champion.tags.items() >= tags.items()
    assert previous.tags["evaluate.win_rate_champion_low"] == "null"
    assert champion.run_id is not None
    assert client.get_run(champion.run_id).data.tags["rondo.address"] == "gate_promote@r1"
    model = client.get_logged_model(champion.source.removeprefix("models:/"))
    assert (model.name, model.params["path"], model.params["step"]) == (
        "r1-ppo",
        "rounds/r1/ppo/policy",
        "12",
    )
    assert model_registry.describe(client).splitlines() == [
        f"champion: version 2, r1, promoted {champion.tags['gate_ended'][:16]}",
        "  win rate against SFT 0.800 [0.700, 0.900]",
        "  win rate against the champion before 0.570 [0.510, 0.630]",
        "  rounds/r1/ppo/policy, md5 bbb.dir, git c0ffee, seed 7",
        f"previous: version 1, r0, promoted {previous.tags['gate_ended'][:16]}",
        "  win rate against SFT 0.800 [0.700, 0.900]",
        "  win rate against the champion before not measured",
        "  rounds/r0/ppo/policy, md5 aaa.dir, git c0ffee, seed 7",
    ]


@pytest.mark.parametrize(
    ("run", "base_model", "reason"),
    [
        (PROJECT, "aaa", ""),
        (TRIAL, "aaa", "it is the result of an isolated run"),
        (OTHER_PROJECT, "aaa", "the champion is of another project"),
        (PROJECT, "bbb", "the champion has another base model, data set or evaluation"),
    ],
)
def test_without_a_comparison_only_a_run_of_the_same_project_and_lineage_takes_the_alias(
    database: str, run: dict[str, str], base_model: str, reason: str
) -> None:
    for policy, md5, tags in (("aaa", "aaa", PROJECT), ("bbb", base_model, run)):
        outs = [{"path": "assets/model", "md5": md5}]
        Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"assets": {"outs": outs}}}))
        make_round("r0", policy, FIRST)
        mirror(policy, database, "r0", **tags)
    client = MlflowClient(database)
    if reason:
        assert aliases(client) == {"champion": "aaa.dir", "challenger": "bbb.dir"}
        assert model_registry.describe(client).splitlines()[-1] == (
            f"  not champion: {reason}; `rondo promote 2 --reason ...` makes it champion"
        )
    else:
        assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


@pytest.mark.parametrize(
    ("run", "low", "champion"),
    [
        (TRIAL, 0.51, "bbb.dir"),
        (TRIAL, 0.49, "aaa.dir"),
        (PROJECT | {"project": "q"}, 0.4, "bbb.dir"),
    ],
)
def test_a_policy_that_was_compared_with_the_champion_takes_the_alias_a_trial_if_it_won(
    database: str, run: dict[str, str], low: float, champion: str
) -> None:
    make_round("r0", "aaa", FIRST)
    mirror("first", database, "r0", **PROJECT)
    make_round("r1", "bbb", CHAMPION | {"win_rate_champion_low": low}, rival="r0")
    mirror("second", database, "r1", **run)
    client = MlflowClient(database)
    assert aliases(client)["champion"] == champion
    # another one has become champion since: the comparison was with its predecessor
    make_round("r2", "ccc", CHAMPION, rival="r1")
    mirror("third", database, "r2", **TRIAL)
    assert aliases(client)["champion"] == ("ccc.dir" if champion == "bbb.dir" else "aaa.dir")


def test_a_trial_becomes_champion_when_the_project_adopts_it(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    mirror("first", database, "r0", **PROJECT)
    make_round("r0", "bbb", FIRST)
    mirror("trial", database, "r0", **TRIAL)
    mirror("trial again", database, "r0", outcome="unchanged", **TRIAL)
    client = MlflowClient(database)
    assert aliases(client) == {"champion": "aaa.dir", "challenger": "bbb.dir"}
    mirror("adopted", database, "r0", outcome="restored", **PROJECT)
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    make_round("r0", "aaa", FIRST)
    mirror("the first one again", database, "r0", outcome="restored", **TRIAL)
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_person_makes_a_challenger_champion(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["promote", "2", "--reason", "our own prompts", "--by", "Ada"])
    assert not ended.value.code
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    assert "by Ada: our own prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["promote", "1", "--rollback", "--reason", "no"])
    assert "--rollback takes no VERSION" in capsys.readouterr().err


def test_sending_the_same_policies_again_in_any_order_changes_nothing(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    first = read_record("both", "gate_promote@r0", "ran", {})
    client = two_rounds(database)
    mirror("again", database, "r0", "r1", outcome="unchanged")
    mirror("only the first", database, "r0")
    MlflowStore(database, False).send(first)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_promotion_interrupted_before_its_alias_is_completed_when_sent_again(
    database: str,
) -> None:
    client = two_rounds(database)
    client.set_registered_model_alias("rondo-policy", "champion", "1")
    client.delete_registered_model_alias("rondo-policy", "previous")
    mirror("again", database, "r1")
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_policy_that_neither_passed_nor_was_approved_is_not_promoted(database: str) -> None:
    bad = {"win_rate_low": 0.4, **FIRST}
    make_round("r0", "aaa", bad, gate="warn")
    assert Path("gates/r0/promote.ok").exists()
    make_round("r1", "bbb", bad)
    make_round("r2", "ccc", FIRST)  # its verdict is from a run before the failed one
    mirror("warned", database, "r0", "r1")
    mirror("failed", database, "r2", outcome="failed")
    client = MlflowClient(database)
    assert aliases(client) == {"challenger": "bbb.dir"} and versions(client) == [
        "aaa.dir",
        "bbb.dir",
    ]
    with pytest.raises(BadInput, match="`warn` is not enough"):
        model_registry.describe(client)

    write_approval(
        "r0",
        "promote",
        Approval(approved=False, by="Ada", reason="a hack", failed={"evaluate.win_rate_low": 0.4}),
    )
    make_round("r0", "aaa", bad, gate="ask")
    mirror("refused", database, "r0")
    assert aliases(client) == {"challenger": "bbb.dir"}


def test_a_challenger_becomes_champion_when_a_person_approves_it(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", {"win_rate_low": 0.4, **CHAMPION}, gate="ask")
    mirror("undecided", database, "r0")
    mirror("undecided", database, "r1", outcome="failed")
    client = MlflowClient(database)
    assert aliases(client) == {"champion": "aaa.dir", "challenger": "bbb.dir"}
    assert "challenger: version 2, r1, not promoted" in model_registry.describe(client)
    write_approval(
        "r1",
        "promote",
        Approval(
            approved=True, by="Ada", reason="read them all", failed={"evaluate.win_rate_low": 0.4}
        ),
    )
    make_round("r1", "bbb", {"win_rate_low": 0.4, **CHAMPION}, gate="ask")
    mirror("approved", database, "r1")
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    assert model_registry.versions_by_alias(client)["champion"].tags["approval.by"] == "Ada"


def test_an_approved_policy_is_promoted_with_the_approver_and_the_reason(database: str) -> None:
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
    (champion,) = model_registry.versions_by_alias(client).values()
    keys = ("passed", "approval.by", "approval.reason", "evaluate.win_rate_low")
    assert {key: champion.tags[key] for key in keys} == {
        "passed": "False",
        "approval.by": "Ada",
        "approval.reason": "read them all",
        "evaluate.win_rate_low": "0.4",
    }
    assert "approved by Ada: read them all" in model_registry.describe(client)


def test_policies_that_a_dead_server_missed_are_promoted_later_and_the_last_is_champion(
    database: str,
) -> None:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION)
    assert NOWHERE in mirror("offline", NOWHERE, "r0", "r1")[0]
    shutil.rmtree("rounds")  # the unsent records contain all that is needed
    outbox = Outbox(Path(".rondo/outbox"), Record)
    # gates before the evaluations that they need, and r1 before r0
    texts = sorted(
        (path.read_text() for path in outbox.waiting()),
        key=lambda text: str(json.loads(text)["address"]),
        reverse=True,
    )
    for path, text in zip(outbox.waiting(), texts, strict=True):
        path.write_text(text)
    for _ in range(2):
        MlflowTracker("next", database, Path(".rondo").absolute(), {}, print).close(True, {})
    assert not outbox.waiting() and not outbox.rejected.exists()
    client = MlflowClient(database)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert (
        model_registry.versions_by_alias(client)["champion"].version == 1
    )  # r1's record was sent first
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def test_a_rollback_stays_and_a_second_one_undoes_it(database: str) -> None:
    client = two_rounds(database)
    model_registry.roll_back(client, "Ada", "one ending for all")
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


def test_a_rollback_of_policies_in_this_folder_reaches_the_next_round(
    database: str,
) -> None:
    client = two_rounds(database)
    for name in ("r0", "r1"):
        write_text(Path(f"rounds/{name}/ppo/policy/adapter.bin"), name)
    model_registry.roll_back(client, "Ada", "one ending for all")
    rollback = read_rollback("r1")
    assert rollback and (rollback.by, rollback.reason, rollback.policy) == (
        "Ada",
        "one ending for all",
        file_hash(Path("rounds/r1/ppo/policy")),
    )
    model_registry.roll_back(client, "Bob", "it was the judge")
    assert read_rollback("r1") is None and read_rollback("r0") is None
    make_round("r1", "ccc", CHAMPION)  # r1 of this folder is no longer the champion
    model_registry.roll_back(client, "Ada", "it was not")
    assert read_rollback("r1") is None


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


def test_the_command(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    two_rounds(database)
    capsys.readouterr()

    def rondo(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["promote", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    code, out, _ = rondo()
    assert code == 0
    assert out.startswith("champion: version 2, r1") and "previous: version 1, r0" in out
    assert rondo("--rollback")[0] == rondo("--reason", "why")[0] == 2
    code, out, _ = rondo("--rollback", "--reason", "one ending for all", "--by", "Ada")
    assert code == 0
    assert out.startswith("champion: version 1, r0") and "by Ada: one ending for all" in out
    Outbox(Path(".rondo/outbox"), Record).add(Record(run="later", started=0, ended=0))
    assert "is sent with the next run" in rondo()[1]
