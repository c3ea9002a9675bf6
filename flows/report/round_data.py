"""The results of a round as its files contain them, for the report; a missing file leaves its field
empty.
"""

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
from stages.lib.core.files import REPORTS, stage_dir
from stages.lib.core.renamed import SAMPLES, current_name
from stages.lib.core.rows import EvaluationSample, read_rows
from stages.lib.core.types import Metrics
from stages.replay.badcases import Badcase, ledger_path, read_ledger

GATES = {"sft": "SFT", "reward": "Reward model", "promote": "Policy"}
SHOWN = 4  # of the best and of the worst samples, and of the badcases in each state


@dataclass(frozen=True)
class Verdict:
    """The result of a gate.

    subject: what the gate checks. passed: None if the gate was not reached. accepted: passed,
    approved, or let the run continue. checks: as in its file, failed ones first.
    """

    subject: str
    passed: bool | None
    accepted: bool
    outcome: str
    checks: Sequence[Metrics]

    @property
    def mark(self) -> tuple[str, str]:
        """Its CSS class and its sign on the page."""
        if self.passed is None:
            return "", "-"
        return ("good", "✓") if self.passed else ("warn", "!") if self.accepted else ("bad", "✗")


@dataclass(frozen=True)
class RoundResults:
    """locks: the entries of its stages in dvc.lock. provenance: the run that made each stage, where
    it is recorded.
    """

    name: str
    verdicts: Sequence[Verdict]
    metrics: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    samples: Sequence[EvaluationSample]
    findings: Sequence[Metrics]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    locks: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, StageProvenance]

    @property
    def done(self) -> bool:
        """No gate failed, and all were reached."""
        return all(verdict.accepted for verdict in self.verdicts)

    def settings(self, stage: str) -> Mapping[str, Any]:
        """The values of params.yaml that the stage ran with."""
        params: Mapping[str, Any] = self.locks[stage].get("params", {}).get("params.yaml", {})
        return params


def read_round(name: str, locks: Mapping[str, Mapping[str, Any]]) -> RoundResults:
    """The results of a round; `locks` are the entries of dvc.lock by address."""
    samples = stage_dir(name, "evaluate") / "samples.jsonl"
    health = summary.read_json_or_nothing(stage_dir(name, "ppo") / "health.json")
    evaluation = summary.read_json_or_nothing(stage_dir(name, "evaluate") / "manifest.json")
    round_locks = {stage: locks.get(f"{stage}@{name}", {}) for stage in summary.STAGES}
    return RoundResults(
        name=name,
        verdicts=[read_verdict(name, gate) for gate in GATES],
        metrics={stage: summary.read_metrics(stage_dir(name, stage)) for stage in summary.STAGES},
        curves={
            stage: columns(stage_dir(name, stage) / "curves.csv") for stage in ("ppo", "evaluate")
        },
        samples=extreme_samples(
            read_rows(EvaluationSample, samples, summary.restore(samples), SAMPLES)
        )
        if samples.exists()
        else [],
        findings=health.get("findings", []),
        data=summary.read_json_or_nothing(REPORTS / name / "data.json"),
        versions=evaluation.get("versions", {}),
        locks=round_locks,
        provenance={
            stage: note
            for stage, lock in round_locks.items()
            if (note := provenance.read(f"{stage}@{name}", lock))
        },
    )


def read_verdict(round_: str, gate: str) -> Verdict:
    result = read_gate(round_, gate)
    if result is None:
        return Verdict(GATES[gate], None, False, "not reached", [])
    checks = sorted(result["checks"], key=lambda check: check["passed"])
    return Verdict(
        GATES[gate], result["passed"], result["may_continue"], summary.outcome(result), checks
    )


def columns(path: Path) -> dict[str, list[float]]:
    """A CSV's columns by name; NaN for an empty cell, no column if there is no file."""
    if not path.exists():
        return {}
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    return {
        current_name(name): [float(row[name]) if row[name] else math.nan for row in rows]
        for name in (rows[0] if rows else ())
    }


def extreme_samples(samples: Sequence[EvaluationSample]) -> list[EvaluationSample]:
    """Samples whose judge score rose most, then those whose rose least, from SFT to the policy."""
    ranked = sorted(samples, key=lambda row: row["sft_judge_score"] - row["ppo_judge_score"])
    return [*ranked[:SHOWN], *ranked[SHOWN:][-SHOWN:]]


@dataclass(frozen=True)
class Badcases:
    """Badcases of all rounds. counts: of each cause by state. examples: some of each state."""

    counts: Mapping[str, Counter[str]]
    examples: Mapping[str, Sequence[Badcase]]


def read_badcases(rounds: Sequence[str]) -> Badcases:
    """The ledger of the newest round that has one; it contains all earlier badcases too."""
    cases = next((read_ledger(name) for name in reversed(rounds) if ledger_path(name).exists()), [])
    counts: dict[str, Counter[str]] = {}
    by_state: dict[str, list[Badcase]] = {}
    for case in cases:
        counts.setdefault(case.cause.value, Counter())[case.state.value] += 1
        by_state.setdefault(case.state.value, []).append(case)
    return Badcases(counts, {state: cases[:SHOWN] for state, cases in by_state.items()})
