"""What the files of a round say, for the report; whatever is not there yet is left out."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.core.verdicts import read_gate
from flows.report import summary
from flows.tracking import provenance
from flows.tracking.provenance import StageProvenance
from stages.lib.core.files import REPORTS, read_jsonl, stage_dir
from stages.lib.core.types import Row
from stages.replay.badcases import Badcase, ledger_path, read_ledger

GATES = {"sft": "SFT", "reward": "Reward model", "promote": "Policy"}
SHOWN = 4  # of the best and the worst samples, and of badcases in each state


@dataclass(frozen=True)
class Verdict:
    """passed: None where the gate was not reached. opened: passed or let through. checks: as in its
    file, those out of their band first.
    """

    who: str
    passed: bool | None
    opened: bool
    outcome: str
    checks: Sequence[Row]

    @property
    def mark(self) -> tuple[str, str]:
        """Its class on the page, and its sign."""
        if self.passed is None:
            return "", "-"
        return ("good", "✓") if self.passed else ("let", "!") if self.opened else ("bad", "✗")


@dataclass(frozen=True)
class Round:
    """locks: what dvc.lock has of its stages. made: by which run, where that is known."""

    name: str
    verdicts: Sequence[Verdict]
    metrics: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    samples: Sequence[Row]
    findings: Sequence[Row]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    locks: Mapping[str, Mapping[str, Any]]
    made: Mapping[str, StageProvenance]

    @property
    def done(self) -> bool:
        """Every gate has opened."""
        return all(verdict.opened for verdict in self.verdicts)

    def settings(self, stage: str) -> Mapping[str, Any]:
        """What of params.yaml the stage has run with."""
        found: Mapping[str, Any] = self.locks[stage].get("params", {}).get("params.yaml", {})
        return found


def read_round(name: str, locks: Mapping[str, Mapping[str, Any]]) -> Round:
    """locks: dvc.lock's, by address."""
    samples = stage_dir(name, "evaluate") / "samples.jsonl"
    ours = {stage: locks.get(f"{stage}@{name}", {}) for stage in summary.STAGES}
    return Round(
        name=name,
        verdicts=[verdict(name, gate) for gate in GATES],
        metrics={stage: summary.read_metrics(stage_dir(name, stage)) for stage in summary.STAGES},
        curves={
            stage: columns(stage_dir(name, stage) / "curves.csv") for stage in ("ppo", "evaluate")
        },
        samples=extreme_samples(read_jsonl(samples, "")) if samples.exists() else [],
        findings=summary.read_json_or_nothing(stage_dir(name, "ppo") / "health.json").get(
            "findings", []
        ),
        data=summary.read_json_or_nothing(REPORTS / name / "data.json"),
        versions=summary.read_json_or_nothing(stage_dir(name, "evaluate") / "manifest.json").get(
            "versions", {}
        ),
        locks=ours,
        made={
            stage: note
            for stage, lock in ours.items()
            if (note := provenance.read(f"{stage}@{name}", lock))
        },
    )


def verdict(round_: str, gate: str) -> Verdict:
    found = read_gate(round_, gate)
    if found is None:
        return Verdict(GATES[gate], None, False, "not reached", [])
    checks = sorted(found["checks"], key=lambda check: check["passed"])
    let_through = "let through, " if found["opened"] and not found["passed"] else ""
    return Verdict(
        GATES[gate], found["passed"], found["opened"], let_through + summary.outcome(found), checks
    )


def columns(path: Path) -> dict[str, list[float]]:
    """A CSV's columns; NaN where a cell is empty."""
    if not path.exists():
        return {}
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    return {
        name: [float(row[name]) if row[name] else math.nan for row in rows]
        for name in (rows[0] if rows else ())
    }


def extreme_samples(samples: Sequence[Row]) -> list[Row]:
    """Those whose judged sentiment the policy has raised most, and least, over SFT's."""
    ranked = sorted(samples, key=lambda row: row["sft_sentiment"] - row["ppo_sentiment"])
    return [*ranked[:SHOWN], *ranked[SHOWN:][-SHOWN:]]


@dataclass(frozen=True)
class Badcases:
    """counts: of each cause by state, over all rounds; some: a few of each state."""

    counts: Mapping[str, Counter[str]]
    some: Mapping[str, Sequence[Badcase]]


def read_badcases(rounds: Sequence[str]) -> Badcases:
    """The ledger of the newest round that has one."""
    cases = next((read_ledger(name) for name in reversed(rounds) if ledger_path(name).exists()), [])
    counts: dict[str, Counter[str]] = {}
    some: dict[str, list[Badcase]] = {}
    for case in cases:
        counts.setdefault(case.cause.value, Counter())[case.state.value] += 1
        some.setdefault(case.state.value, []).append(case)
    return Badcases(counts, {state: found[:SHOWN] for state, found in some.items()})
