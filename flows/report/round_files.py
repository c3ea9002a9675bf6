"""Reads what the stages of a round have made: metrics, manifests, verdicts, settings.

Only files of stages in `locks` are read (`flows.core.locks.current_locks`), and those of ended
rounds: other files are those of an earlier run.
"""

from pathlib import Path
from typing import Any

from flows.core.addresses import split_address
from flows.core.locks import Locks
from flows.core.tables import finite
from flows.core.verdicts import read_gate
from stages.gate.thresholds import GATE_STAGES
from stages.gate.verdict import evaluate_gate, metric_value
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.files import read_json, stage_dir
from stages.lib.core.params import Params, load_params

STAGES = (
    "prepare",
    "sft",
    "annotate",
    "reward",
    "battery",
    "ppo",
    "evaluate",
    "capability",
    "replay",
)


def known_rounds(locks: Locks) -> list[str]:
    """The rounds with results of any stage, r2 before r10."""
    names = {split_address(address)[1] for address in locks} - {""}
    return sorted(names, key=lambda name: (len(name), name))


def read_metrics(round_: str, stage: str, locks: Locks) -> dict[str, Any]:
    """metrics.json of a stage; empty if it has no results."""
    return read_json_or_nothing(result_file(round_, stage, "metrics.json", locks))


def read_manifest(round_: str, stage: str, locks: Locks) -> dict[str, Any]:
    return read_json_or_nothing(result_file(round_, stage, "manifest.json", locks))


def result_file(round_: str, stage: str, name: str, locks: Locks) -> Path | None:
    """A file of a stage's folder; None if it is missing or not of the stage's results."""
    path = stage_dir(round_, stage) / name
    return path if has_results(f"{stage}@{round_}", locks) and path.exists() else None


def label_path(round_: str) -> Path:
    """What people judged of a round (people.py)."""
    return Path("labels") / f"{round_}.jsonl"


def has_results(address: str, locks: Locks) -> bool:
    """Whether a stage's files are its results, and not those of an earlier run."""
    return address in locks or has_ended(split_address(address)[1])


def read_json_or_nothing(path: Path | None) -> dict[str, Any]:
    return dict(read_json(path, restore(path))) if path else {}


def restore(path: Path) -> str:
    """The command that restores a damaged result, or makes it again."""
    return f"rm {path} && rondo run"  # DVC may take the damaged file for unchanged


def verdicts(round_: str, locks: Locks) -> dict[str, dict[str, Any]]:
    """The verdicts of a round by gate, if they are about the numbers that the round has now.

    git has no verdicts: in a clone, those of gates that let the run continue are evaluated again.
    """
    metrics = {stage: read_metrics(round_, stage, locks) for stage in STAGES}
    by_gate = {}
    for gate in GATE_STAGES:
        verdict = read_gate(round_, gate)
        if verdict is None and has_results(f"gate_{gate}@{round_}", locks):
            verdict = evaluate_gate(settings_of(round_), gate, round_)
        if verdict and all(
            check["value"] == finite(metric_value(metrics, check["metric"]))
            for check in verdict["checks"]
        ):
            by_gate[gate] = verdict
    return by_gate


def settings_of(round_: str) -> Params:
    """The settings of a round; params.yaml for one that it does not have, e.g. after a preset with
    fewer rounds.
    """
    return params_of(round_) if has_ended(round_) else load_params()
