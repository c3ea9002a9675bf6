"""The results table: one column per round, from the files in `rounds/`; a missing number is `-`.

A run prints it at its end. It also goes to reports/summary.md and into the report, and `verdict`
names the stage at fault below it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.table import Table

from flows.core.services import HOME
from flows.core.tables import render_text
from flows.core.verdicts import failed_checks, read_gate
from stages.evaluate.comparability import differences
from stages.gate.verdict import format_check, passed_or_approved
from stages.lib.core.files import (
    REPORTS,
    ROUNDS,
    read_json,
    remove_unfinished,
    stage_dir,
    write_text,
)
from stages.lib.core.renamed import current_metrics

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


def known_rounds() -> list[str]:
    """The rounds with metrics of any stage, r2 before r10."""
    names = {path.parent.parent.name for path in ROUNDS.glob("*/*/metrics.json")}
    return sorted(names, key=lambda name: (len(name), name))


def evaluations(rounds: list[str]) -> list[list[str]]:
    """The evaluated rounds, grouped by evaluation: only the numbers within a group are comparable
    (stages/evaluate/comparability.py).
    """
    groups: dict[str | None, list[str]] = {}
    for name in rounds:
        if metrics := read_metrics(stage_dir(name, "evaluate")):
            groups.setdefault(metrics.get("evaluation_id"), []).append(name)
    return list(groups.values())


def not_comparable(rounds: list[str]) -> list[str]:
    """A line for each evaluation after the first: its mark in the table, the settings that differ,
    and the command that makes it comparable.
    """
    (first, *_), *other_groups = evaluations(rounds) or [[""]]
    lines = []
    for number, group in enumerate(other_groups, 1):
        first_settings, group_settings = (
            read_json_or_nothing(stage_dir(name, "evaluate") / "manifest.json").get(
                "evaluation", {}
            )
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


def rows(rounds: list[str]) -> list[tuple[str, list[str]]]:
    """Row titles, each with one cell per round.

    A row of the evaluation is repeated for each group of comparable evaluations, so that numbers
    that are not comparable never stand in one row.
    """
    cells, groups = {name: cells_of(name) for name in rounds}, evaluations(rounds)
    table_rows = []
    for title, template in ROWS.items():
        several = len(groups) > 1 and "{evaluate." in template
        for number, group in enumerate(groups if several else [rounds]):
            marked_title = f"{title} {NOT_COMPARABLE * number}".strip()
            row = [cells[name][title] if name in group else "-" for name in rounds]
            table_rows.append((marked_title, row))
    return table_rows


def table(rounds: list[str], markdown: bool = False) -> Table:
    """The rows with one column per round."""
    rich_table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD)
    for column in ("", *rounds):
        rich_table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for title, cells in rows(rounds):
        rich_table.add_row(title, *cells)
    return rich_table


def stage_of(title: str) -> str:
    """The stage that writes the first number of a row."""
    return ROWS[title].partition("{")[2].partition(".")[0]


def cells_of(round_: str) -> dict[str, str]:
    """A round's cells by title; `-` if no number of a cell is known."""
    metrics = {stage: Metrics(read_metrics(stage_dir(round_, stage))) for stage in STAGES}
    cells = {title: template.format_map(metrics) for title, template in ROWS.items()}
    return {
        title: cell if any(character.isdigit() for character in cell) else "-"
        for title, cell in cells.items()
    }


def read_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json of a stage's folder; empty if there is none."""
    return read_json_or_nothing(folder / "metrics.json")


def read_json_or_nothing(path: Path) -> dict[str, Any]:
    return dict(current_metrics(read_json(path, restore(path)))) if path.exists() else {}


def restore(path: Path) -> str:
    """The command that restores a damaged result, or makes it again."""
    return f"rm {path} && rondo run"  # DVC may take the damaged file for unchanged


def verdict_lines(rounds: list[str]) -> list[str]:
    """A line per round: if a gate stopped it, the stage at fault by the first gate that failed,
    even if that one let the run continue with `policy: warn`; and the other gates that failed or
    were approved.
    """
    lines = []
    for name in rounds:
        results = {gate: result for gate in GATES if (result := read_gate(name, gate))}
        failed_gate = None
        if not all(result["may_continue"] for result in results.values()):
            failed_gate = next(g for g, result in results.items() if not passed_or_approved(result))
        not_passed = "".join(
            f"; {gate} gate: {outcome(result)}"
            for gate, result in results.items()
            if gate != failed_gate and not result["passed"]
        )
        if failed_gate:
            at_fault = stage_at_fault(name, failed_gate, results[failed_gate])
            text = f"{at_fault}: {'; '.join(failed_checks(results[failed_gate]))}"
        elif len(results) == len(GATES):
            text = "no gate stopped the run" if not_passed else "all gates passed"
        else:
            text = f"has not reached the {next(g for g in GATES if g not in results)} gate"
        lines.append(f"{name}: {text}{not_passed}{effect(name)}")
    return lines


def effect(round_: str) -> str:
    """Whether a round made a better policy than the champion at equal KL; empty if unknown."""
    metrics = read_metrics(stage_dir(round_, "evaluate"))
    low, high = (metrics.get(f"{EQUAL_KL}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return ""
    verdict = "helped" if low > 0.5 else "hurt" if high < 0.5 else "no difference shown"
    needed = metrics.get(f"{EQUAL_KL}_prompts_needed")
    prompts = f" (about {needed} prompts would decide)" if needed else ""
    champion = metrics["champion_round"]
    caution = cautions(round_) if verdict == "helped" else ""
    return f"; at equal KL, the round against {champion}: {verdict}{prompts}{caution}"


def cautions(round_: str) -> str:
    """Other reasons than replay why a round may have made a better policy (docs/rounds.md)."""
    text = ""
    start = read_json_or_nothing(stage_dir(round_, "ppo") / "manifest.json").get("started_from")
    if start and not start.startswith(f"{stage_dir(round_, 'sft')}/"):
        text += f". Its PPO continued from {start}, so the policy had more updates"
    if labelled := labelled_pairs(round_):
        text += f". But the jury labelled {labelled} pairs that its reward model learnt from"
        text += ": compare with a judge that labelled none"
    return text and f"{text} (docs/rounds.md)"


def labelled_pairs(round_: str) -> int:
    """How many pairs of the policy's responses the jury labelled in earlier rounds."""
    names = known_rounds()
    earlier = names[: names.index(round_)]
    return sum(read_metrics(stage_dir(name, "replay")).get("policy_pairs", 0) for name in earlier)


def stage_at_fault(round_: str, gate: str, verdict: Mapping[str, Any]) -> str:
    """The model at fault; none if the policy only failed the check against the champion."""
    if {check["metric"] for check in verdict["checks"] if not check["passed"]} == {CHAMPION}:
        return "not promoted, the champion stays"
    return f"{GATES[gate].format(algorithm=algorithm(round_))} is at fault"


def algorithm(round_: str) -> str:
    """The algorithm that trained the policy, as the literature spells it."""
    name: str = read_json_or_nothing(stage_dir(round_, "ppo") / "manifest.json").get(
        "algorithm", "ppo"
    )
    return name.upper() if name != "best_of_n" else "best-of-n"


def outcome(verdict: Mapping[str, Any]) -> str:
    """How a gate ended: passed, or its failed checks with who approved or refused them and why."""
    if verdict["passed"]:
        return "passed"
    failed = ", ".join(format_check(check) for check in verdict["checks"] if not check["passed"])
    if approval := verdict["approval"]:
        decision = "approved" if approval["approved"] else "refused"
        return f"{decision} by {approval['by']} ({approval['reason']}): {failed}"
    return f"failed{' (policy: warn)' if verdict['may_continue'] else ''}: {failed}"


def markdown(rounds: list[str]) -> str:
    """The table and the verdicts, for reports/summary.md and docs/default.md."""
    lines = [*not_comparable(rounds), *verdict_lines(rounds)]
    return "\n".join(
        [render_text(table(rounds, markdown=True)), "", *(f"- {line}" for line in lines), ""]
    )


def text(rounds: list[str]) -> str:
    """The table and the verdicts for a terminal, and where to look next."""
    return "\n".join(
        [render_text(table(rounds)), "", *not_comparable(rounds), *verdict_lines(rounds), NEXT]
    )


def write(rounds: list[str]) -> None:
    replace_text(SUMMARY, markdown(rounds))


def replace_text(path: Path, text: str) -> None:
    """Write a file of the report, and remove what killed commands had not finished of it."""
    with FileLock(HOME / "report.lock"):  # a run and a person may write it at once
        remove_unfinished(path)
        write_text(path, text)
