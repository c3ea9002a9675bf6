"""The results of a round as its files contain them, for the report; a missing file leaves its field
empty.
"""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flows.core import tables
from flows.core.locks import Locks
from flows.report import diagnosis, round_files
from flows.report.badcases import read_cases
from flows.report.samples import EXPLOIT, count, read_samples
from flows.tracking import provenance
from flows.tracking.provenance import StageProvenance
from stages.gate.verdict import passed_or_approved
from stages.lib.core.files import REPORTS
from stages.lib.core.rows import EvaluationSample
from stages.lib.core.types import Metrics
from stages.replay.badcases import Badcase

GATES = {"sft": "SFT", "reward": "Reward model", "promote": "Policy"}
NUMBERS = 3  # of a gate on the first screen
SHOWN = 4  # of the best and of the worst samples, and of the badcases in each state


class Number(NamedTuple):
    """A number that a gate checked: its name in words, its value, the threshold, and whether it
    passed.
    """

    name: str
    value: str
    wanted: str
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """The result of a gate.

    subject: what the gate checks. passed: None if the gate was not reached. approved: passed, or a
    person approved it. outcome: in words. measured_on: how many texts, or empty. numbers: a few,
    failed ones first. checks: all as in its file, failed ones first.
    """

    subject: str
    passed: bool | None
    approved: bool
    outcome: str
    measured_on: str = ""
    numbers: Sequence[Number] = ()
    checks: Sequence[Metrics] = ()
    judged: bool = True

    @property
    def mark(self) -> tuple[str, str]:
        """Its CSS class and its sign on the page."""
        if self.passed is None or not self.judged:
            return "", "-"
        return ("good", "✓") if self.passed else ("warn", "!") if self.approved else ("bad", "✗")


@dataclass(frozen=True)
class RoundResults:
    """curves: the columns of PPO's curves.csv. locks: the entries in dvc.lock of the stages that
    have results. provenance: the run that made each stage, where it is recorded. samples: the best
    and the worst. sample_counts: `all`, those that `lost` to SFT, and each `exploit`
    (flows/report/samples.py).
    """

    name: str
    verdicts: Sequence[Verdict]
    metrics: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Sequence[float]]
    samples: Sequence[EvaluationSample]
    sample_counts: Mapping[str, int]
    findings: Sequence[Metrics]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    locks: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, StageProvenance]

    def settings(self, stage: str) -> Mapping[str, Any]:
        """The values of params.yaml that the stage ran with."""
        lock = self.locks.get(stage, {})
        params: Mapping[str, Any] = lock.get("params", {}).get("params.yaml", {})
        return params


def read_round(name: str, locks: Locks) -> RoundResults:
    """The results of a round, of the stages in `locks`."""
    samples = read_samples(name, locks)
    health = round_files.result_file(name, "ppo", "health.json", locks)
    data, has_data = REPORTS / name / "data.json", round_files.has_results(f"prepare@{name}", locks)
    results, stages = round_files.verdicts(name, locks), round_files.STAGES
    round_locks = {
        stage: lock for stage in stages if (lock := locks.get(f"{stage}@{name}")) is not None
    }
    return RoundResults(
        name=name,
        verdicts=[verdict_of(name, gate, results.get(gate), locks) for gate in GATES],
        metrics={stage: round_files.read_metrics(name, stage, locks) for stage in stages},
        curves=columns(round_files.result_file(name, "ppo", "curves.csv", locks)),
        samples=extreme_samples(samples),
        sample_counts={
            "all": len(samples),
            "lost": count(samples, "show", "lost"),
            "exploit": count(samples, "sign", EXPLOIT),
        },
        findings=round_files.read_json_or_nothing(health).get("findings", []),
        data=round_files.read_json_or_nothing(data if has_data and data.exists() else None),
        versions=round_files.read_manifest(name, "evaluate", locks).get("versions", {}),
        locks=round_locks,
        provenance={
            stage: note
            for stage, lock in round_locks.items()
            if (note := provenance.read(f"{stage}@{name}", lock))
        },
    )


def verdict_of(round_: str, gate: str, result: Metrics | None, locks: Locks) -> Verdict:
    if result is None:
        return Verdict(GATES[gate], None, False, "not reached")
    checks = sorted(result["checks"], key=lambda check: check["passed"])
    measured = [check for check in checks if check["value"] is not None or not check["passed"]]
    return Verdict(
        GATES[gate],
        result["passed"],
        passed_or_approved(result),
        diagnosis.outcome(result),
        diagnosis.count_of(checks[-1], round_, locks).removeprefix(" on "),
        [number_of(check, round_, locks) for check in measured[:NUMBERS]],
        checks,
        "not_judged" not in result,
    )


def number_of(check: Metrics, round_: str, locks: Locks) -> Number:
    """A check in words; the lower end of an interval with its mean and its upper end."""
    ends = diagnosis.interval_of(check, round_, locks)
    value = "missing" if check["value"] is None else tables.format_number(check["value"])
    if ends is None:
        return Number(check["name"], value, check["threshold"], check["passed"])
    return Number(
        check["name"], tables.interval(*ends), f"low end {check['threshold']}", check["passed"]
    )


def columns(path: Path | None) -> dict[str, list[float]]:
    """A CSV's columns by name; NaN for an empty cell, no column if there is no file."""
    if path is None or not path.exists():
        return {}
    with path.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return {
        name: [float(row[name]) if row[name] else math.nan for row in rows]
        for name in (rows[0] if rows else ())
    }


def extreme_samples(samples: Sequence[EvaluationSample]) -> list[EvaluationSample]:
    """Samples whose judge score rose most, then those whose rose least, from SFT to the policy;
    without those that the judge has not scored.
    """
    scored = [row for row in samples if {"sft_judge_score", "ppo_judge_score"} <= row.keys()]
    ranked = sorted(scored, key=lambda row: row["sft_judge_score"] - row["ppo_judge_score"])
    return [*ranked[:SHOWN], *ranked[SHOWN:][-SHOWN:]]


@dataclass(frozen=True)
class Badcases:
    """Badcases of all rounds. counts: of each cause by state. examples: some of each state."""

    counts: Mapping[str, Counter[str]]
    by_round: Mapping[str, int]
    examples: Mapping[str, Sequence[Badcase]]


def read_badcases(rounds: Sequence[str], locks: Locks) -> Badcases:
    counts: dict[str, Counter[str]] = {}
    by_state: dict[str, list[Badcase]] = {}
    cases = read_cases(rounds, locks)
    for case in cases:
        counts.setdefault(case.cause.value, Counter())[case.state.value] += 1
        by_state.setdefault(case.state.value, []).append(case)
    return Badcases(
        counts,
        Counter(case.round for case in cases),
        {state: cases[:SHOWN] for state, cases in by_state.items()},
    )
