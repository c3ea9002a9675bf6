"""The results table: one column per round, from the files in `rounds/`; a missing number is `-`.

A run prints it at its end, below the answer (diagnosis.py). It also goes to reports/summary.md and
into the report.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.table import Table

from flows.core.locks import METRICS, Locks, has_metrics
from flows.core.services import HOME
from flows.core.tables import filled, fitted_text, render_text, terminal_width
from flows.report.diagnosis import EQUAL_KL, verdict_lines
from flows.report.round_files import (
    STAGES,
    label_path,
    read_manifest,
    read_metrics,
    restore,
    settings_of,
    verdicts,
)
from stages.evaluate.comparability import differences
from stages.gate.thresholds import format_threshold
from stages.gate.verdict import bound_of, look_up
from stages.lib.core.files import (
    ASSETS,
    REPORTS,
    remove_unfinished,
    stage_dir,
    write_text,
)
from stages.lib.core.params import flatten
from stages.lib.core.reading import read_text
from stages.lib.thresholds import THRESHOLDS

SUMMARY = REPORTS / "summary.md"
NEXT = "More: `rondo report` (charts and texts), `rondo up` (all runs in the browser)."
NOT_COMPARABLE = "†"  # marks a row of another evaluation than the first, †† of a third one
BETTER, WORSE = "better", "worse"  # than the round before
ENDS = ("_low", "_high")  # of an interval
TITLE_WIDTH, ROUND_WIDTH = 34, 22  # columns of a terminal, at least


class Row(NamedTuple):
    """A row of the table.

    part: the part of the pipeline that it is about. title: in words. template: of its cell:
    str.format with the metrics of a round by stage. better: `higher`, `lower`, or empty if neither
    is better. value: the metric to compare rounds by, if `better`. gate: the key in `gates` of its
    threshold. absent: stands for a number that was not measured, although its stage has run.
    """

    part: str
    title: str
    template: str
    better: str = ""
    value: str = ""
    gate: str = ""
    absent: str = ""


def _interval(key: str, digits: int = 3) -> str:
    """The template of a mean with its 95% interval."""
    mean, low, high = (f"{{{key}{end}:.{digits}f}}" for end in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


def _rate(part: str, title: str, key: str, gate: str = "", absent: str = "") -> Row:
    """The row of a mean with its interval; higher is better."""
    return Row(part, f"{title} [95%]", _interval(key), "higher", key, gate, absent)


NO_CHAMPION = "no champion yet"
ROWS = (
    Row(
        "Data",
        "demonstrations, pairs; replayed rows",
        "{prepare.sft_train}, {prepare.pairs_train}; {prepare.replayed}",
    ),
    Row(
        "SFT",
        "SFT loss, nats per token",
        "{sft.loss_before:.3f} -> {sft.loss_after:.3f}",
        "lower",
        "sft.loss_after",
        "sft.loss_drop",
    ),
    _rate("SFT", "SFT's wins less losses against base", "sft.net_win_rate", "sft.net_win_rate"),
    _rate("Reward model", "RM held-out accuracy", "reward.accuracy", "reward.accuracy"),
    Row(
        "Reward model",
        "RM margin",
        "{reward.margin:.2f}",
        "higher",
        "reward.margin",
        "reward.margin",
    ),
    _rate(
        "Reward model",
        "judge score, RM's best of n - one sample",
        "battery.best_of_n.rise",
        "reward.best_of_n_rise",
    ),
    Row(
        "Reward model",
        "RM pairs reversed by the worst ending",
        "{battery.worst_ending:.2f}",
        "lower",
        "battery.worst_ending",
        "reward.ending",
    ),
    Row(
        "Policy",
        "policy's reward, first -> selected",
        "{ppo.score_mean_first:.2f} -> {ppo.score_mean:.2f}",
    ),
    Row(
        "Policy",
        "policy selected; health",
        "update {ppo.policy_update} of {ppo.updates}; {ppo.health}",
    ),
    Row("Policy", "selected policy scaled by", "{ppo.policy_scale:.2f}"),
    Row("Policy", "policy's KL from SFT, nats", "{evaluate.ppo.kl:.2f}"),
    Row(
        "Policy",
        "policy's KL from SFT, nats per token",
        "{evaluate.ppo.kl_per_token:.2f}",
        "lower",
        "evaluate.ppo.kl_per_token",
        "promote.max_kl_per_token",
    ),
    _rate(
        "Policy",
        "KL efficiency, against best-of-n of SFT",
        "evaluate.kl_efficiency",
        absent="not measured",
    ),
    Row(
        "Policy",
        "KL from the first SFT: policy; champion",
        "{evaluate.ppo.kl_anchor:.2f}; {evaluate.champion.kl_anchor:.2f}",
    ),
    Row("Policy", "policy's response length, tokens", "{evaluate.ppo.length:.1f}"),
    _rate("Evaluation", "win rate against SFT", "evaluate.win_rate", "promote.win_rate"),
    Row(
        "Evaluation",
        "win rate against the champion [95%]",
        "{evaluate.champion_round}: " + _interval("evaluate.win_rate_champion"),
        gate="promote.champion_win_rate",
        absent=NO_CHAMPION,
    ),
    Row(
        "Evaluation",
        "win rate against the champion at equal KL [95%]",
        _interval(f"evaluate.{EQUAL_KL}"),
        absent="not compared",
    ),
    Row(
        "Evaluation",
        "prompts needed to decide the win rate",
        "{evaluate.win_rate_prompts_needed}",
        absent="decided",
    ),
    Row(
        "Evaluation",
        "judge score, SFT -> policy",
        "{evaluate.sft.judge_score:.2f} -> {evaluate.ppo.judge_score:.2f}",
        "higher",
        "evaluate.ppo.judge_score",
        absent="the judge only compares",
    ),
    Row(
        "Evaluation",
        "distinct-2, SFT -> policy",
        "{evaluate.sft.distinct_2:.2f} -> {evaluate.ppo.distinct_2:.2f}",
        "higher",
        "evaluate.ppo.distinct_2",
        "promote.distinct_2",
    ),
    Row(
        "Evaluation",
        "loss on human texts over SFT, nats per token",
        "{evaluate.human_nll_rise:.2f}",
        "lower",
        "evaluate.human_nll_rise",
        "promote.human_nll_rise",
    ),
    Row(
        "Evaluation",
        "worst slice: drop against SFT",
        "{capability.worst} {capability.worst_fall:.3f}",
        "lower",
        "capability.worst_fall",
        absent="no slices",
    ),
    Row("Badcases", "badcases found", "{replay.badcases}"),
    Row(
        "Badcases",
        "badcases repaired",
        "{replay.repaired} of {replay.retested}, {replay.repaired_by_chance} by chance",
    ),
    Row(
        "Badcases",
        "repaired badcases that regressed",
        "{replay.regressed} of {replay.guarded}",
        "lower",
        "replay.regressed",
        "promote.regressed",
    ),
    Row(
        "Badcases",
        "RM pairs reversed by exploits, before -> after",
        "{replay.reversed_before:.2f} -> {replay.reversed_after:.2f}",
        absent="no exploits to retest",
    ),
    _rate(
        "Badcases",
        "RM pairs reversed by exploits, drop",
        "replay.reversed_fall",
        absent="no exploits to retest",
    ),
)


class Missing:
    """Stands for a number that is missing: any attribute and any format of it give `-`."""

    def __getattr__(self, _: str) -> "Missing":
        return self

    def __format__(self, _: str) -> str:
        return "-"


class Metrics:
    """metrics.json by attribute, for str.format."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getattr__(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            return Missing()
        return Metrics(value) if isinstance(value, Mapping) else value


def evaluations(rounds: list[str], locks: Locks) -> list[list[str]]:
    """The evaluated rounds, grouped by evaluation: only the numbers within a group are comparable
    (stages/evaluate/comparability.py).
    """
    groups: dict[str | None, list[str]] = {}
    for name in rounds:
        if metrics := read_metrics(name, "evaluate", locks):
            groups.setdefault(metrics.get("evaluation_id"), []).append(name)
    return list(groups.values())


def not_comparable(rounds: list[str], locks: Locks) -> list[str]:
    """A line for each evaluation after the first: its mark in the table, the settings that differ,
    and the command that makes it comparable.
    """
    (first, *_), *other_groups = evaluations(rounds, locks) or [[""]]
    lines = []
    for number, group in enumerate(other_groups, 1):
        first_settings, group_settings = (
            read_manifest(name, "evaluate", locks).get("evaluation", {})
            for name in (first, group[0])
        )
        changed = (
            "; ".join(differences(first_settings, group_settings))
            if first_settings and group_settings
            else "a manifest.json does not contain them"
        )
        lines.append(
            f"{NOT_COMPARABLE * number} {', '.join(group)} not comparable with {first}: "
            f"evaluated with other settings ({changed}); run `rondo run --rerun {first}`"
        )
    return lines


def other_gates(rounds: list[str]) -> list[str]:
    """A line for each round whose gates had other thresholds than those of the round before."""
    gates = [
        dict(flatten(settings_of(name).gates.model_dump(mode="json"), "gates.", "."))
        for name in rounds
    ]
    return [
        f"{name}: its gates had other thresholds than {before}'s ({'; '.join(changed)})"
        for (before, old), (name, new) in pairwise(zip(rounds, gates, strict=True))
        if (changed := differences(old, new))
    ]


def edited_metrics(rounds: list[str], locks: Locks) -> list[str]:
    """A line for each metrics.json of an ended round that is not the one that its stage wrote.

    Those of other rounds are no results (flows/core/locks.py).
    """
    return [
        f"{stage_dir(name, stage) / METRICS}: not the one that dvc.lock records: restore it "
        f"(`git checkout` or `rondo run --rerun {name}`)"
        for name in rounds
        for stage in STAGES
        if not has_metrics(locks.get(f"{stage}@{name}", {}))
    ]


def notes(rounds: list[str], locks: Locks) -> list[str]:
    """What a reader of the table has to know: which numbers are not comparable or edited, and who
    judged.
    """
    return [
        *not_comparable(rounds, locks),
        *other_gates(rounds),
        *edited_metrics(rounds, locks),
        *judge_lines(rounds, locks),
    ]


class Cell(NamedTuple):
    """A number of a round as text, and the sign of its change since the round before; may be empty.

    sure: whether their 95% intervals do not overlap. failed: whether it failed its gate.
    """

    text: str
    sign: str = ""
    sure: bool = False
    failed: bool = False


class TableRow(NamedTuple):
    """A row of the table: its part of the pipeline, title, threshold, and a cell per round."""

    part: str
    title: str
    wanted: str
    cells: list[Cell]


def rows(rounds: list[str], locks: Locks) -> list[TableRow]:
    """The rows of the table.

    A row of the evaluation is repeated for each group of comparable evaluations, so that numbers
    that are not comparable never stand in one row.
    """
    metrics = {name: round_metrics(name, locks) for name in rounds}
    failing = {name: failed_bounds(name, locks) for name in rounds}
    groups, table_rows = evaluations(rounds, locks), []
    for row in [*ROWS, *further_rewards(metrics.values())]:
        several = len(groups) > 1 and "{evaluate." in row.template
        for number, group in enumerate(groups if several else [rounds]):
            cells = dict.fromkeys(rounds, Cell("-"))
            for name, before in zip(group, [None, *group], strict=False):
                text, failed = cell_text(row, metrics[name]), f"gates.{row.gate}" in failing[name]
                sign, sure = change(row, metrics[before], metrics[name]) if before else ("", False)
                same = before and cells[before].text == text
                cells[name] = Cell(text, "" if same else sign, sure, failed)
            title = f"{row.title} {NOT_COMPARABLE * number}".strip()
            table_rows.append(TableRow(row.part, title, wanted(row, rounds), [*cells.values()]))
    return table_rows


def failed_bounds(round_: str, locks: Locks) -> set[str]:
    """The keys of the thresholds at which a gate of the round failed."""
    checks = [check for verdict in verdicts(round_, locks).values() for check in verdict["checks"]]
    return {check["bound"] for check in checks if not check["passed"]}


def round_metrics(round_: str, locks: Locks) -> dict[str, dict[str, Any]]:
    """The metrics of a round by stage."""
    return {stage: read_metrics(round_, stage, locks) for stage in STAGES}


def further_rewards(rounds: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row per reward of ppo.rewards."""
    names = {
        key.removesuffix("_first")
        for metrics in rounds
        for key in metrics["ppo"]
        if key.startswith("score_") and key.endswith("_first")
    }
    return [
        Row(
            "Policy",
            f"policy's reward `{name.removeprefix('score_')}`, first -> selected",
            f"{{ppo.{name}_first:.2f}} -> {{ppo.{name}:.2f}}",
        )
        for name in sorted(names - {"score_mean"})
    ]


def cell_text(row: Row, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """A round's number; why there is none if its stage has run, else `-`."""
    cell = row.template.format_map({stage: Metrics(values) for stage, values in metrics.items()})
    if any(character.isdigit() for character in cell):
        return cell
    stage = row.template.partition("{")[2].partition(".")[0]
    return row.absent if row.absent and metrics[stage] else "-"


def change(row: Row, before: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[str, bool]:
    """The sign of a change since the round before, and whether it is more than noise."""
    if not row.better:
        return "", False
    old, new = (look_up(values, row.value) for values in (before, metrics))
    if not (is_number(old) and is_number(new)) or old == new:
        return "", False
    ends = [look_up(values, f"{row.value}{end}") for values in (before, metrics) for end in ENDS]
    sure = all(map(is_number, ends)) and (ends[2] > ends[1] or ends[3] < ends[0])
    return BETTER if (new > old) == (row.better == "higher") else WORSE, sure


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def wanted(row: Row, rounds: list[str]) -> str:
    """The threshold of a row; empty if it has none."""
    if not row.gate or not rounds:
        return ""
    gate, _, bound = row.gate.partition(".")
    [threshold, *_] = [one for one in THRESHOLDS[gate] if one.bound == bound]
    limit = bound_of(gate, threshold, settings_of(rounds[-1]))
    end = "low end " if threshold.metric.endswith("_low") else ""
    end = "change " if " - " in threshold.metric else end
    return f"{end}{format_threshold(threshold, limit)}"


def table(rounds: list[str], locks: Locks, markdown: bool = False) -> Table:
    """The rows with one column per round."""
    rich_table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD)
    for column in ("", *rounds):
        rich_table.add_column(column, justify="right" if column else "left", no_wrap=markdown)
    for row in rows(rounds, locks):
        rich_table.add_row(row.title, *(cell.text for cell in row.cells))
    return rich_table


def judge_lines(rounds: list[str], locks: Locks) -> list[str]:
    """Of which judges' votes the jury's win rates are, and what people judged: lines per round; and
    what assets/data records of the source of the labels.
    """
    lines = []
    for name in rounds:
        metrics = read_metrics(name, "evaluate", locks)
        jury = metrics.get("jury", {})
        votes = [
            f"{judge} {metrics[f'win_rate_{judge}']:.3f}{reliability(values)}"
            for judge, values in jury.get("alone", {}).items()
            if metrics.get(f"win_rate_{judge}") is not None
        ]
        pairs = jury.get("pairs", {}).items()
        agreed = [
            f"{pair} agree on {row['agreement']:.0%}"
            for pair, row in pairs
            if row["agreement"] is not None
        ]
        if votes:
            lines.append(f"{name}: win rate against SFT by judge: {'; '.join([*votes, *agreed])}")
        if label_path(name).exists():
            from flows.report import people  # imports scikit-learn

            lines += people.all_lines(name)
        elif votes and name == rounds[-1]:
            lines.append(f"{name}: no person has judged it yet: `rondo label {name}`")
    source = ASSETS / "data/SOURCE.txt"
    notes = read_text(source, restore(source)).splitlines() if source.exists() else []
    return [*lines, *(note for note in notes if note.startswith("Labels: "))]


def reliability(judge: Mapping[str, Any]) -> str:
    """How often a judge called a tie, and how many of its answers were no verdict."""
    ties, unreadable = judge.get("tie_share"), judge.get("unparsable")
    shown = [] if ties is None else [f"{ties:.0%} ties"]
    if unreadable:
        shown.append(f"{unreadable} of {judge['comparisons']} comparisons without readable answers")
    return f" ({', '.join(shown)})" if shown else ""


def markdown(rounds: list[str], locks: Locks) -> str:
    """The answers, then the table, for reports/summary.md."""
    answers = [f"- {line}" for line in verdict_lines(rounds, locks)]
    shown = render_text(table(rounds, locks, markdown=True))
    below = (f"- {note}" for note in notes(rounds, locks))
    return "\n".join([*answers, "", shown, "", *below, ""])


def text(rounds: list[str], locks: Locks) -> str:
    """The table for a terminal, and below it the answers, where a reader looks first.

    A narrow terminal gets the newest rounds that fit.
    """
    width = terminal_width()
    fitting = len(rounds) if width is None else max(1, (width - TITLE_WIDTH) // ROUND_WIDTH)
    shown = fitted_text(table(rounds[-fitting:], locks), width, keep=2)
    earlier = [f"Earlier rounds: {SUMMARY}"] if fitting < len(rounds) else []
    lines = [*earlier, *notes(rounds, locks), *verdict_lines(rounds, locks), NEXT]
    return "\n".join([shown, "", *(filled(line, width) for line in lines)])


def write(rounds: list[str], locks: Locks) -> None:
    replace_text(SUMMARY, lambda: markdown(rounds, locks))


def replace_text(path: Path, make: Callable[[], str]) -> None:
    """Write a file of the report, and remove what killed commands had not finished of it.

    If its text cannot be made, the file is removed: it would be taken for that of the last run.
    """
    try:
        text = make()
        with FileLock(HOME / "report.lock"):  # a run and a person may write it at once
            remove_unfinished(path)
            write_text(path, text)
    except Exception:
        path.unlink(missing_ok=True)
        raise
