"""The results table: one column per round, from the files in `rounds/`; a missing number is `-`.

A run prints it at its end. It also goes to reports/summary.md and into the report, and `verdict`
names the stage at fault below it. Only files of stages in `locks` are read
(`flows.core.locks.current_locks`), and those of ended rounds.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.table import Table

from flows.core.addresses import split_address
from flows.core.locks import Locks
from flows.core.services import HOME
from flows.core.tables import render_text
from flows.core.verdicts import failed_checks, read_gate
from stages.evaluate.comparability import differences
from stages.gate.verdict import (
    evaluate_gate,
    format_check,
    metric_value,
    passed_or_approved,
)
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.files import (
    ASSETS,
    REPORTS,
    read_json,
    remove_unfinished,
    stage_dir,
    write_text,
)
from stages.lib.core.params import Params, load_params
from stages.lib.core.reading import read_text

SUMMARY = REPORTS / "summary.md"
NEXT = (
    "Where to look next: `make ui` (runs, curves, checkpoints), `dvc metrics show`, "
    "`dvc plots show`, reports/<round>/."
)
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
NOT_COMPARABLE = "†"  # marks a row of another evaluation than the first, †† of a third one
CHAMPION = "evaluate.win_rate_champion_low"
PASSED = "passed"  # the outcome of a gate
EQUAL_KL = "win_rate_champion_equal_kl"
GATES = {"sft": "SFT", "reward": "the reward model", "promote": "{algorithm}"}


def _interval(key: str, digits: int = 3) -> str:
    """The template of a mean with its 95% interval."""
    mean, low, high = (f"{{{key}{end}:.{digits}f}}" for end in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


# Row title -> template of its cell: str.format with the metrics of one round by stage, e.g.
# {battery.best_of_n.rise:.3f}.
ROWS = {
    "demonstrations, pairs; replayed rows": (
        "{prepare.sft_train}, {prepare.pairs_train}; {prepare.replayed}"
    ),
    "SFT loss, nats per token": "{sft.loss_before:.3f} -> {sft.loss_after:.3f}",
    "SFT's wins less losses against base [95%]": _interval("sft.net_win_rate"),
    "RM held-out accuracy [95%]": _interval("reward.accuracy"),
    "RM margin": "{reward.margin:.2f}",
    "judge score, RM's best of n - one sample [95%]": _interval("battery.best_of_n.rise"),
    "RM pairs reversed by the worst ending": "{battery.worst_ending:.2f}",
    "policy's reward, first -> selected": "{ppo.score_mean_first:.2f} -> {ppo.score_mean:.2f}",
    "policy selected": "update {ppo.policy_update} of {ppo.updates}, {ppo.health}",
    "selected policy scaled by": "{ppo.policy_scale:.2f}",
    "policy's KL from SFT, nats": "{evaluate.ppo.kl:.2f}",
    "KL from the first SFT: policy; champion": (
        "{evaluate.ppo.kl_anchor:.2f}; {evaluate.champion.kl_anchor:.2f}"
    ),
    "policy's response length, tokens": "{evaluate.ppo.length:.1f}",
    "win rate against SFT [95%]": _interval("evaluate.win_rate"),
    "win rate against the champion [95%]": (
        "{evaluate.champion_round}: " + _interval("evaluate.win_rate_champion")
    ),
    "win rate against the champion at equal KL [95%]": _interval(f"evaluate.{EQUAL_KL}"),
    "prompts needed to decide the win rate": "{evaluate.win_rate_prompts_needed}",
    "judge score, SFT -> policy": (
        "{evaluate.sft.judge_score:.2f} -> {evaluate.ppo.judge_score:.2f}"
    ),
    "distinct-2, SFT -> policy": "{evaluate.sft.distinct_2:.2f} -> {evaluate.ppo.distinct_2:.2f}",
    "loss on human texts over SFT, nats per token": "{evaluate.human_nll_rise:.2f}",
    "worst slice: drop against SFT": "{capability.worst} {capability.worst_fall:.3f}",
    "badcases found": "{replay.badcases}",
    "badcases repaired": (
        "{replay.repaired} of {replay.retested}, {replay.repaired_by_chance} by chance"
    ),
    "repaired badcases that regressed": "{replay.regressed} of {replay.guarded}",
    "RM pairs reversed by exploits, before -> after": (
        "{replay.reversed_before:.2f} -> {replay.reversed_after:.2f}"
    ),
    "RM pairs reversed by exploits, drop [95%]": _interval("replay.reversed_fall", digits=2),
}


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


def known_rounds(locks: Locks) -> list[str]:
    """The rounds with results of any stage, r2 before r10."""
    names = {split_address(address)[1] for address in locks} - {""}
    return sorted(names, key=lambda name: (len(name), name))


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


def rows(rounds: list[str], locks: Locks) -> list[tuple[str, list[str]]]:
    """Row titles, each with one cell per round.

    A row of the evaluation is repeated for each group of comparable evaluations, so that numbers
    that are not comparable never stand in one row.
    """
    cells, groups = {name: cells_of(name, locks) for name in rounds}, evaluations(rounds, locks)
    table_rows = []
    for title, template in ROWS.items():
        several = len(groups) > 1 and "{evaluate." in template
        for number, group in enumerate(groups if several else [rounds]):
            marked_title = f"{title} {NOT_COMPARABLE * number}".strip()
            row = [cells[name][title] if name in group else "-" for name in rounds]
            table_rows.append((marked_title, row))
    return table_rows


def table(rounds: list[str], locks: Locks, markdown: bool = False) -> Table:
    """The rows with one column per round."""
    rich_table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD)
    for column in ("", *rounds):
        rich_table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for title, cells in rows(rounds, locks):
        rich_table.add_row(title, *cells)
    return rich_table


def cells_of(round_: str, locks: Locks) -> dict[str, str]:
    """A round's cells by title; `-` if no number of a cell is known."""
    metrics = {stage: Metrics(read_metrics(round_, stage, locks)) for stage in STAGES}
    cells = {title: template.format_map(metrics) for title, template in ROWS.items()}
    return {
        title: cell if any(character.isdigit() for character in cell) else "-"
        for title, cell in cells.items()
    }


def read_metrics(round_: str, stage: str, locks: Locks) -> dict[str, Any]:
    """metrics.json of a stage; empty if it has no results."""
    return read_json_or_nothing(result_file(round_, stage, "metrics.json", locks))


def read_manifest(round_: str, stage: str, locks: Locks) -> dict[str, Any]:
    return read_json_or_nothing(result_file(round_, stage, "manifest.json", locks))


def result_file(round_: str, stage: str, name: str, locks: Locks) -> Path | None:
    """A file of a stage's folder; None if it is missing or not of the stage's results."""
    path = stage_dir(round_, stage) / name
    return path if has_results(f"{stage}@{round_}", locks) and path.exists() else None


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
    for gate in GATES:
        verdict = read_gate(round_, gate)
        if verdict is None and has_results(f"gate_{gate}@{round_}", locks):
            verdict = evaluate_gate(settings_of(round_), gate, round_)
        if verdict and all(
            check["value"] == finite(metric_value(metrics, check["metric"]))
            for check in verdict["checks"]
        ):
            by_gate[gate] = verdict
    return by_gate


def finite(value: float | None) -> float | None:
    """A number as a verdict has it."""
    return None if value is None or not math.isfinite(value) else value


def settings_of(round_: str) -> Params:
    """The settings of a round; params.yaml for one that it does not have, e.g. after a preset with
    fewer rounds.
    """
    return params_of(round_) if has_ended(round_) else load_params()


def verdict_lines(rounds: list[str], locks: Locks) -> list[str]:
    """A line per round: the stage at fault by the first gate that failed, with its next step, even
    if that one let the run continue with `policy: warn`; and the other gates that failed or were
    approved.
    """
    lines = []
    for name in rounds:
        results = verdicts(name, locks)
        failed_gate = next(
            (g for g, result in results.items() if not passed_or_approved(result)), None
        )
        not_passed = "".join(
            f"; {gate} gate: {outcome(result)}"
            for gate, result in results.items()
            if gate != failed_gate and outcome(result) != PASSED
        )
        if failed_gate:
            failed = results[failed_gate]
            stopped = not all(result["may_continue"] for result in results.values())
            continued = "" if stopped else " (policy: warn)"
            at_fault = f"{stage_at_fault(name, failed_gate, failed, locks)}{continued}"
            text = f"{at_fault}: {'; '.join(failed_checks(failed))}"
        elif len(results) == len(GATES):
            text = "no gate stopped the run" if not_passed else "all gates passed"
        else:
            text = f"has not reached the {next(g for g in GATES if g not in results)} gate"
        lines.append(f"{name}: {text}{not_passed}{effect(name, locks)}")
    return lines


def effect(round_: str, locks: Locks) -> str:
    """Whether a round made a better policy than the champion at equal KL; empty if unknown."""
    metrics = read_metrics(round_, "evaluate", locks)
    low, high = (metrics.get(f"{EQUAL_KL}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return ""
    verdict = "helped" if low > 0.5 else "hurt" if high < 0.5 else "no difference shown"
    needed = metrics.get(f"{EQUAL_KL}_prompts_needed")
    prompts = f" (about {needed} prompts would decide)" if needed else ""
    champion = metrics["champion_round"]
    caution = cautions(round_, locks) if verdict == "helped" else ""
    return f"; at equal KL, the round against {champion}: {verdict}{prompts}{caution}"


def cautions(round_: str, locks: Locks) -> str:
    """Other reasons than replay why a round may have made a better policy (docs/rounds.md)."""
    text = ""
    start = read_manifest(round_, "ppo", locks).get("started_from")
    if start and not start.startswith(f"{stage_dir(round_, 'sft')}/"):
        text += f". Its PPO continued from {start}, so the policy had more updates"
    if labelled := labelled_pairs(round_, locks):
        text += f". But the jury labelled {labelled} pairs that its reward model learnt from"
        text += ": compare with a judge that labelled none"
    return text and f"{text} (docs/rounds.md)"


def labelled_pairs(round_: str, locks: Locks) -> int:
    """How many pairs of the policy's responses the jury labelled in earlier rounds."""
    names = known_rounds(locks)
    earlier = names[: names.index(round_)]
    return sum(read_metrics(name, "replay", locks).get("policy_pairs", 0) for name in earlier)


def judge_lines(rounds: list[str], locks: Locks) -> list[str]:
    """Of which judges' votes the jury's win rates are: a line per round; and what assets/data
    records of the source of the labels.
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


def stage_at_fault(round_: str, gate: str, verdict: Mapping[str, Any], locks: Locks) -> str:
    """The model at fault; none if the policy only failed the check against the champion."""
    if {check["metric"] for check in verdict["checks"] if not check["passed"]} == {CHAMPION}:
        return "not promoted, the champion stays"
    return f"{GATES[gate].format(algorithm=algorithm(round_, locks))} is at fault"


def algorithm(round_: str, locks: Locks) -> str:
    """The algorithm that trained the policy, as the literature spells it."""
    name: str = read_manifest(round_, "ppo", locks).get("algorithm", "ppo")
    return name.upper() if name != "best_of_n" else "best-of-n"


def outcome(verdict: Mapping[str, Any]) -> str:
    """How a gate ended: passed, not judged and why, or its failed checks with who approved or
    refused them and why.
    """
    if reason := verdict.get("not_judged"):
        return f"not judged ({reason})"
    if verdict["passed"]:
        return PASSED
    failed = ", ".join(format_check(check) for check in verdict["checks"] if not check["passed"])
    if approval := verdict["approval"]:
        decision = "approved" if approval["approved"] else "refused"
        return f"{decision} by {approval['by']} ({approval['reason']}): {failed}"
    return f"failed{' (policy: warn)' if verdict['may_continue'] else ''}: {failed}"


def markdown(rounds: list[str], locks: Locks) -> str:
    """The table and the verdicts, for reports/summary.md and docs/default.md."""
    lines = [
        *not_comparable(rounds, locks),
        *judge_lines(rounds, locks),
        *verdict_lines(rounds, locks),
    ]
    shown = render_text(table(rounds, locks, markdown=True))
    return "\n".join([shown, "", *(f"- {line}" for line in lines), ""])


def text(rounds: list[str], locks: Locks) -> str:
    """The table and the verdicts for a terminal, and where to look next."""
    lines = [
        *not_comparable(rounds, locks),
        *judge_lines(rounds, locks),
        *verdict_lines(rounds, locks),
        NEXT,
    ]
    return "\n".join([render_text(table(rounds, locks)), "", *lines])


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
