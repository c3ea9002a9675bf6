"""Rounds whose promotion gates are recorded in MLflow, for the tests of the champion."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient

from flows.execution.meter import Meter
from flows.tracking import model_registry
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.gate.verdict import run_gate
from stages.lib.core.errors import GateFailed
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params import check_params
from stages.lib.core.params.data import rounds

GOOD = {"win_rate": 0.8, "win_rate_low": 0.7, "win_rate_high": 0.9, "human_nll_rise": 0.5}
GOOD |= {
    "sft": {"repetition_3": 0.0, "eos_rate": 0.7},
    "ppo": {"kl_per_token": 0.4, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.9},
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
    """Write the files of DVC and the stages, up to the verdict, and params.yaml with four rounds.

    policy: its md5 less `.dir`. rival: the round of the champion with which it was compared.
    """
    champion = {"round": rival, "hashes": {"policy": "ab"}} if rival else {"round": None}
    write_json(stage_dir(round_, "champion") / "champion.json", champion)
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
        write_text(stage_dir(round_, stage) / out / "model.bin", f"{md5} of {round_}")
        lock["stages"][f"{stage}@{round_}"] = {
            "outs": [{"path": f"rounds/{round_}/{stage}/{out}", "md5": md5}]
        }
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    four = {name: entry.model_dump() for name, entry in rounds(4).items()}
    Path("params.yaml").write_text(yaml.safe_dump({"rounds": four}))
    with suppress(GateFailed):
        run_gate(check_params({"gates": {"promote": {"policy": gate}}}, "test"), "promote", round_)


def mirror(run: str, uri: str, *rounds: str, outcome: str = "ran", **others: str) -> list[str]:
    """Send the gates of `rounds` to MLflow, as a pipeline run does; returns the messages.

    others: tags of the run besides revision and seed.
    """
    messages: list[str] = []
    tags = {"revision": "c0ffee", "seed": "7", **others}
    tracker = MlflowTracker(run, uri, Path(".rondo").absolute(), tags, messages.append)
    tracker.begin()
    for round_ in rounds:
        for stage in ("evaluate", "gate_promote"):
            tracker.start(f"{stage}@{round_}", Meter())
            tracker.finish("ran" if stage == "evaluate" and outcome == "failed" else outcome)
    tracker.close("FINISHED", {"summary.md": "the table"})
    return messages


def two_rounds(database: str) -> MlflowClient:
    make_round("r0", "aaa", FIRST)
    make_round("r1", "bbb", CHAMPION, rival="r0")
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
