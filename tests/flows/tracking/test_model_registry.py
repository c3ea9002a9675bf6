"""Champion and previous in a real MLflow database, from the files of two rounds and real gates."""

from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from flows.tracking import model_registry
from flows.tracking.mlflow_store import MlflowStore
from flows.tracking.records import read_record
from stages.gate.approvals import Approval, write_approval
from stages.lib.core.errors import BadInput
from tests.flows.tracking.promotions import (
    CHAMPION,
    FIRST,
    OTHER_PROJECT,
    PROJECT,
    TRIAL,
    aliases,
    make_round,
    mirror,
    two_rounds,
    versions,
)
from tests.servers import NOWHERE


def test_a_policy_whose_gate_passed_becomes_champion_with_its_evidence(database: str) -> None:
    client = two_rounds(database)
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    champion, previous = (
        model_registry.versions_by_alias(client)[alias] for alias in ("champion", "previous")
    )
    tags = {"round": "r1", "path": "rounds/r1/ppo/policy", "md5": "bbb.dir", "seed": "7"}
    tags |= {"md5.sft": "5f7r1.dir", "revision": "c0ffee", "passed": "True", "policy": "block"}
    tags |= {"evaluate.win_rate": "0.8", "evaluate.win_rate_champion_high": "0.63"}
    tags |= {"evaluate.win_rate_low": "0.7", "evaluate.ppo.kl_per_token": "0.4"}
    tags |= {"evaluate.ppo.repetition_3 - evaluate.sft.repetition_3": "0.0", "ppo.dangers": "0.0"}
    assert champion.tags.items() >= tags.items()
    assert previous.tags["evaluate.win_rate_champion_low"] == "null"
    assert champion.run_id is not None
    assert client.get_run(champion.run_id).data.tags["rondo.address"] == "gate_promote@r1"
    assert champion.description == (
        "Policy of r1, seed 7. Win rate against SFT 0.800 [0.700, 0.900], against the champion "
        "before it 0.570 [0.510, 0.630]. Weights: `rounds/r1/ppo/policy`, md5 bbb.dir."
    )
    model = client.get_logged_model(champion.source.removeprefix("models:/"))
    assert model.name == "r1-ppo"
    assert model.params == {"path": "rounds/r1/ppo/policy", "step": "12"}
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
        (PROJECT, "bbb", ""),  # other settings: it is the champion of the project's later rounds
    ],
)
def test_without_a_comparison_only_a_run_of_the_same_project_takes_the_alias(
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
        (TRIAL, 0.51, "aaa.dir"),  # the project's rounds do not have it yet
        (PROJECT | {"project": "q"}, 0.4, "bbb.dir"),  # a clone that goes on with its rounds
    ],
)
def test_a_policy_that_was_compared_with_the_champion_takes_the_alias_but_no_trial(
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
    mirror("third", database, "r2", **OTHER_PROJECT)
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


def test_sending_the_same_policies_again_in_any_order_changes_nothing(database: str) -> None:
    """But for a promotion that was interrupted before its alias: it is completed."""
    make_round("r0", "aaa", FIRST)
    first = read_record("both", "gate_promote@r0", "ran", {})
    client = two_rounds(database)
    mirror("again", database, "r0", "r1", outcome="unchanged")
    mirror("only the first", database, "r0")
    MlflowStore(database).send(first)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    client.set_registered_model_alias("rondo-policy", "champion", "1")
    client.delete_registered_model_alias("rondo-policy", "previous")
    mirror("interrupted", database, "r1")
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}


def decide(round_: str, approved: bool, reason: str) -> None:
    """A person has seen that the win rate is low."""
    failed: dict[str, float | None] = {"evaluate.win_rate_low": 0.4}
    approval = Approval(approved=approved, by="Ada", reason=reason, failed=failed)
    write_approval(round_, "promote", approval)


def test_a_policy_that_neither_passed_nor_was_approved_is_not_promoted(database: str) -> None:
    bad = {"win_rate_low": 0.4, **FIRST}
    make_round("r0", "aaa", bad, gate="warn")
    assert Path("gates/r0/promote.ok").exists()
    make_round("r1", "bbb", bad)
    make_round("r2", "ccc", FIRST)  # its verdict is from a run before the failed one
    mirror("warned", database, "r0", "r1")
    mirror("failed", database, "r2", outcome="failed")
    client = MlflowClient(database)
    assert aliases(client) == {"challenger": "bbb.dir"}
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    with pytest.raises(BadInput, match="`warn` is not enough"):
        model_registry.describe(client)
    decide("r0", False, "a hack")
    make_round("r0", "aaa", bad, gate="ask")
    mirror("refused", database, "r0")
    assert aliases(client) == {"challenger": "bbb.dir"}


def test_a_challenger_becomes_champion_when_a_person_approves_it(database: str) -> None:
    low = {"win_rate_low": 0.4, **CHAMPION}
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", low, gate="ask", rival="r0")
    mirror("undecided", database, "r0")
    mirror("undecided", database, "r1", outcome="failed")
    client = MlflowClient(database)
    assert aliases(client) == {"champion": "aaa.dir", "challenger": "bbb.dir"}
    assert "challenger: version 2, r1, not promoted" in model_registry.describe(client)
    decide("r1", True, "read them all")
    make_round("r1", "bbb", low, gate="ask", rival="r0")
    mirror("approved", database, "r1")
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
    evidence = {
        "passed": "False",
        "approval.by": "Ada",
        "approval.reason": "read them all",
        "evaluate.win_rate_low": "0.4",
    }
    champion = model_registry.versions_by_alias(client)["champion"]
    assert champion.tags.items() >= evidence.items()
    assert "approved by Ada: read them all" in model_registry.describe(client)


def test_policies_that_a_dead_server_missed_are_promoted_later(database: str) -> None:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION, rival="r0")
    assert NOWHERE in mirror("offline", NOWHERE, "r0", "r1")[0]
    assert mirror("next", database) == []
    client = MlflowClient(database)
    assert versions(client) == ["aaa.dir", "bbb.dir"]
    assert aliases(client) == {"champion": "bbb.dir", "previous": "aaa.dir"}
