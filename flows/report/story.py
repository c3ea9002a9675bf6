"""What the files of a round say, for the report; whatever is not there yet is left out."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import summary
from flows.dag import read_gate
from stages.badcases import Badcase, ledger_path, read_ledger
from stages.records import REPORTS, Row, read_jsonl, stage_dir, work_dir

GATES = {"sft": "SFT", "reward": "Reward model", "promote": "Policy"}
SHOWN = 4  # of the best and the worst samples, and of badcases in each state


@dataclass(frozen=True)
class Verdict:
    """passed: None where the gate was not reached. checks: as in the gate's file, those out of their band first."""

    who: str
    passed: bool | None
    opened: bool
    outcome: str
    checks: Sequence[Row]


@dataclass(frozen=True)
class Round:
    name: str
    verdicts: Sequence[Verdict]
    metrics: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    samples: Sequence[Row]
    findings: Sequence[Row]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    minutes: Mapping[str, float]

    @property
    def done(self) -> bool:
        """Every gate has opened."""
        return all(verdict.opened for verdict in self.verdicts)


def read_round(name: str) -> Round:
    samples = stage_dir(name, "evaluate") / "samples.jsonl"
    return Round(
        name=name,
        verdicts=[verdict(name, gate) for gate in GATES],
        metrics={stage: summary.read_metrics(stage_dir(name, stage)) for stage in summary.STAGES},
        curves={stage: columns(stage_dir(name, stage) / "curves.csv") for stage in ("ppo", "evaluate")},
        samples=telling(read_jsonl(samples, "")) if samples.exists() else [],
        findings=summary.read_json_or_nothing(stage_dir(name, "ppo") / "health.json").get("findings", []),
        data=summary.read_json_or_nothing(REPORTS / name / "data.json"),
        versions=summary.read_json_or_nothing(stage_dir(name, "evaluate") / "manifest.json").get("versions", {}),
        minutes={stage: taken / 60 for stage in summary.STAGES if (taken := seconds(name, stage)) is not None},
    )


def verdict(round_: str, gate: str) -> Verdict:
    found = read_gate(round_, gate)
    if found is None:
        return Verdict(GATES[gate], None, False, "not reached", [])
    checks = sorted(found["checks"], key=lambda check: check["passed"])
    return Verdict(GATES[gate], found["passed"], found["opened"], summary.outcome(found), checks)


def columns(path: Path) -> dict[str, list[float]]:
    """A CSV's columns; NaN where a cell is empty."""
    if not path.exists():
        return {}
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    return {name: [float(row[name]) if row[name] else math.nan for row in rows] for name in (rows[0] if rows else ())}


def seconds(round_: str, stage: str) -> float | None:
    """From its start to its last step, by the clock beside its metrics; None where it ran elsewhere or has no steps."""
    clock = work_dir(round_, stage) / "clock.jsonl"
    times = [row["time"] for row in read_jsonl(clock, "")] if clock.exists() else []
    return times[-1] - times[0] if len(times) > 1 else None


def telling(samples: Sequence[Row]) -> list[Row]:
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
