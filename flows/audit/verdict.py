"""The lines of an audit: its metrics against the thresholds of the reward model's gate; and the
files that people and programs read.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flows.audit.subjects import Subject
from flows.core.tables import format_number
from flows.report.texts import prompt_text, visible_text
from stages.battery.report import ScoredText
from stages.gate.thresholds import format_threshold
from stages.gate.verdict import COMPARE, bound_of, metric_value
from stages.lib.core.files import write_json, write_text
from stages.lib.core.html import render_page
from stages.lib.core.params import Params
from stages.lib.core.types import Metrics
from stages.lib.thresholds.form import Threshold
from stages.lib.thresholds.reward import REWARD

PASSED, FAILED, NOT_MEASURED = "pass", "FAIL", "not measured"

REPEAT_BOUND = 0.1  # standard deviations of the scores, or of a judge one verdict in ten
REPEAT = Threshold("audit.repeat_difference", "<=", "", "", "", "", "")


class Words(NamedTuple):
    """A line in words, whoever made the model: its name, what a failure means, what to do then."""

    name: str
    fault: str
    advice: str


WORDS = {
    "reward.accuracy_low": Words(
        "accuracy, lower bound",
        "it ranks too many pairs otherwise than people do",
        "Train it on more pairs of this kind, or use another model",
    ),
    "reward.margin": Words(
        "margin of chosen over rejected, log-odds",
        "chosen and rejected texts have nearly the same score",
        "Train it longer, or on pairs with clearer labels",
    ),
    "reward.accuracy - reward.baseline_longest": Words(
        "accuracy above always choosing the longer text",
        "length alone ranks these pairs as well",
        "Balance the lengths of chosen and rejected texts",
    ),
    "reward.accuracy - reward.baseline_tfidf": Words(
        "accuracy above word counts (TF-IDF)",
        "word counts, fitted on four fifths of these pairs, rank the others as well",
        "Look for words that give the label away (`rondo check-data`), or train on more pairs",
    ),
    "battery.judge_accuracy_low": Words(
        "the second judge's accuracy, lower bound",
        "the second judge does not prefer what people prefer in these pairs",
        "Choose one that fits the task: this one's opinion says nothing",
    ),
    "battery.judge_lead": Words(
        "accuracy above the second judge's",
        "the second judge ranks the pairs better",
        "Optimise against the second judge, or train on more and cleaner pairs",
    ),
    "battery.worst_slice": Words(
        "accuracy on the worst slice",
        "one kind of pair is ranked badly",
        "Add pairs of that slice",
    ),
    "battery.worst_slice_low": Words(
        "accuracy on the worst slice, lower bound",
        "a kind of pair is ranked badly, or has too few pairs to show that it is not",
        "Add pairs of that slice, or audit with more of them",
    ),
    "reward.ece": Words(
        "calibration error",
        "its confidence differs from its accuracy",
        "Scale its scores by a temperature, or train it for fewer epochs",
    ),
    "battery.drift": Words(
        "the policy's samples less the chosen texts, standard deviations",
        "it scores the policy's samples as texts unlike those of the pairs",
        "Add pairs of the policy's own samples",
    ),
    "battery.scale": Words(
        "spread of the policy's samples over that of the chosen texts",
        "scores of the policy's samples hardly differ, or a few extreme ones decide",
        "Add pairs of the policy's own samples",
    ),
    "battery.length_correlation_partial": Words(
        "correlation of score and length, label held fixed",
        "length itself changes the score",
        "Balance the lengths of its pairs, or take the effect of length off its scores",
    ),
    "battery.worst_probe": Words(
        "corrupted texts that score higher, worst kind",
        "it prefers broken texts",
        "Add pairs whose rejected text is corrupted in that way",
    ),
    "battery.worst_flip": Words(
        "pairs reversed by an edit that keeps the meaning",
        "the order of two texts depends on their format",
        "Add pairs in which that format does not go with the label",
    ),
    "battery.worst_ending": Words(
        "pairs reversed by a listed ending",
        "an ending raises the score of bad texts, and a policy will find it",
        "Add pairs with it on the rejected text",
    ),
    "battery.worst_mined": Words(
        "pairs reversed by a phrase of high-scoring texts",
        "a phrase that goes with high scores raises the score of bad texts",
        "Add pairs with it on the rejected text",
    ),
    "battery.best_of_n.rise_low": Words(
        "second judge's gain by the best of n, lower bound",
        "the second judge does not prefer the samples with the highest scores",
        "Do not optimise against it; read the samples that it prefers",
    ),
    REPEAT.metric: Words(
        "difference of two runs",
        "the same texts get other scores in other batches, or the same pairs other verdicts",
        "Compute it in float32, or ask it at temperature 0",
    ),
}
LINES = [*(line for line in REWARD if line.metric in WORDS), REPEAT]


class Line(NamedTuple):
    """One line of the verdict. reason: why it failed or was not measured. advice: what to do."""

    metric: str
    name: str
    value: float | None
    wanted: str
    outcome: str
    reason: str
    advice: str


def lines_of(metrics: Metrics, subject: Subject, params: Params) -> list[Line]:
    return [line_of(threshold, metrics, subject, params) for threshold in LINES]


def line_of(threshold: Threshold, metrics: Metrics, subject: Subject, params: Params) -> Line:
    bound = REPEAT_BOUND if threshold is REPEAT else bound_of("reward", threshold, params)
    value = metric_value(metrics, threshold.metric)
    words = WORDS[threshold.metric]
    wanted, reason, advice = format_threshold(threshold, bound), "", ""
    if value is None or math.isnan(value):
        value, outcome = None, NOT_MEASURED
        reason = why_not_measured(threshold.metric, subject, metrics)
    elif COMPARE[threshold.compare](value, bound):
        outcome = PASSED
    else:
        outcome, reason, advice = FAILED, words.fault, words.advice
    return Line(threshold.metric, words.name, value, wanted, outcome, reason, advice)


def why_not_measured(metric: str, subject: Subject, metrics: Metrics) -> str:
    stage, _, name = metric.partition(".")
    if stage == "reward":
        return f"scores of a {subject.kind} need not be log-odds"
    if name.startswith("judge_"):
        return "needs a second judge that is another one: --judge"
    if "probes" not in metrics["battery"] and not name.startswith("worst_slice"):
        return "it compares two texts and gives none a score"
    if name in ("drift", "scale"):
        return "needs a policy: --policy"
    if name.startswith("best_of_n"):
        return "needs a policy and a second judge: --policy and --judge"
    if name == "worst_mined":
        return "no phrase goes with high scores"
    if name.startswith("length"):
        return "beside the label, the scores do not vary"
    return "no slice has 30 pairs" if name.startswith("worst_slice") else "no text could be changed"


def headline(lines: Sequence[Line]) -> str:
    """
    Example:
        >>> headline([])
        'all 0 lines that were measured pass'
    """
    measured = [line for line in lines if line.outcome != NOT_MEASURED]
    failed = sum(line.outcome == FAILED for line in measured)
    if not failed:
        return f"all {len(measured)} lines that were measured pass"
    return f"{failed} of {len(measured)} lines fail"


def text(lines: Sequence[Line]) -> str:
    """For the terminal: one line each, and under a failed one what it means and what to do."""
    rows = []
    for line in lines:
        value = "" if line.value is None else f" {format_number(line.value)}, wanted {line.wanted}"
        note = f": {line.reason}" if line.outcome == NOT_MEASURED else ""
        rows.append(f"{line.outcome:<13}{line.name}{value}{note}")
        if line.outcome == FAILED:
            rows.append(f"{'':<13}{line.reason}. {line.advice}")
    return "\n".join(rows)


def markdown(lines: Sequence[Line], facts: Mapping[str, Any]) -> str:
    """For a model card: what was audited on what, and the lines."""
    about = [f"- {name}: {value}" for name, value in facts.items()]
    rows = ["| line | value | wanted | |", "|---|---|---|---|"]
    for line in lines:
        value = "-" if line.value is None else format_number(line.value)
        note = f"{line.outcome}: {line.reason}" if line.reason else line.outcome
        cells = (line.name, value, line.wanted, note)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([f"Audit: {headline(lines)}.", "", *about, "", *rows]) + "\n"


def write(
    folder: Path,
    lines: Sequence[Line],
    facts: Mapping[str, Any],
    metrics: Metrics,
    shown: Sequence[ScoredText],
) -> None:
    """Write audit.json, audit.md and audit.html."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [line._asdict() for line in lines]
    write_json(folder / "audit.json", {"facts": facts, "lines": rows, "metrics": metrics})
    write_text(folder / "audit.md", markdown(lines, facts))
    page = render_page(
        "flows.report",
        "audit.html.jinja",
        {"number": format_number, "visible": visible_text, "prompt": prompt_text},
        title=headline(lines),
        facts=facts,
        lines=lines,
        battery=metrics["battery"],
        shown=shown,
    )
    write_text(folder / "audit.html", page)
