"""The table at the end of a run, from whatever `rounds/*/` holds; what is missing shows as `-`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.table import Table

from flows.core.tables import drawn
from flows.core.verdicts import failed_checks, read_gate
from stages.evaluate.comparability import differences
from stages.gate.verdict import format_check
from stages.lib.core.files import REPORTS, ROUNDS, stage_dir, write_text

SUMMARY = REPORTS / "summary.md"
NEXT = "Where to look next: `make ui` (runs, curves, checkpoints), `dvc metrics show`, `dvc plots show`, reports/<round>/."
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
OTHERWISE = "†"  # of numbers from another evaluation than the first
CHAMPION = "evaluate.win_rate_champion_low"
GATES = {"sft": "SFT", "reward": "the reward model", "promote": "{algorithm}"}

# Row title -> the cell's text, with the metrics of one round by `stage.key` or `stage.group.key`.
ROWS = {
    "demonstrations, pairs; replayed rows": "{prepare.sft_train}, {prepare.pairs_train}; {prepare.replayed}",
    "SFT loss, nats a token": "{sft.loss_before:.3f} -> {sft.loss_after:.3f}",
    "SFT against base, judged [95%]": "{sft.judged_gain:.3f} [{sft.judged_gain_low:.3f}, {sft.judged_gain_high:.3f}]",
    "RM held-out accuracy [95%]": "{reward.accuracy:.3f} [{reward.accuracy_low:.3f}, {reward.accuracy_high:.3f}]",
    "RM margin": "{reward.margin:.2f}",
    "RM best-of-n rise, judged [95%]": "{battery.best_of_n.rise:.3f} [{battery.best_of_n.rise_low:.3f}, {battery.best_of_n.rise_high:.3f}]",
    "RM fooled by its worst ending": "{battery.worst_ending:.2f}",
    "policy's reward, first -> kept": "{ppo.score_mean_first:.2f} -> {ppo.score_mean:.2f}",
    "policy kept": "update {ppo.policy_update} of {ppo.updates}, {ppo.health}",
    "policy's KL from SFT, nats": "{evaluate.ppo.kl:.2f}",
    "policy's response length, tokens": "{evaluate.ppo.length:.1f}",
    "win rate against SFT [95%]": "{evaluate.win_rate:.3f} [{evaluate.win_rate_low:.3f}, {evaluate.win_rate_high:.3f}]",
    "win rate against the champion [95%]": "{evaluate.champion_round}: {evaluate.win_rate_champion:.3f} "
    "[{evaluate.win_rate_champion_low:.3f}, {evaluate.win_rate_champion_high:.3f}]",
    "win rate undecided: prompts needed": "{evaluate.win_rate_prompts_needed}",
    "judged sentiment, SFT -> policy": "{evaluate.sft.sentiment:.2f} -> {evaluate.ppo.sentiment:.2f}",
    "distinct-2, SFT -> policy": "{evaluate.sft.distinct_2:.2f} -> {evaluate.ppo.distinct_2:.2f}",
    "people's texts, rise over SFT, nats a token": "{evaluate.human_nll_rise:.2f}",
    "worst slice: worse than SFT by up to": "{capability.worst} {capability.worst_fall:.3f}",
    "badcases found": "{replay.badcases}",
    "badcases repaired": "{replay.repaired} of {replay.tried_again}, {replay.repaired_by_chance} by chance",
    "repaired ones that came back": "{replay.regressed} of {replay.guarded}",
    "RM fooled, before -> after": "{replay.fooled_before:.2f} -> {replay.fooled_after:.2f}",
    "RM fooled, fall [95%]": "{replay.fooled_fall:.2f} [{replay.fooled_fall_low:.2f}, {replay.fooled_fall_high:.2f}]",
}
"""Cells are `str.format` templates over a `Metrics`."""


class Missing:
    """Stands for a number that is not there, at any depth, in any format."""

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
        return (
            Missing() if value is None else Metrics(value) if isinstance(value, Mapping) else value
        )


def known_rounds() -> list[str]:
    """Rounds of which there is anything, r2 before r10."""
    found = {path.parent.parent.name for path in ROUNDS.glob("*/*/metrics.json")}
    return sorted(found, key=lambda name: (len(name), name))


def evaluations(rounds: list[str]) -> list[list[str]]:
    """The rounds that were evaluated, apart where it was another evaluation
    (stages/evaluate/comparability.py).
    """
    found: dict[str | None, list[str]] = {}
    for name in rounds:
        if metrics := read_metrics(stage_dir(name, "evaluate")):
            found.setdefault(metrics.get("evaluation_id"), []).append(name)
    return list(found.values())


def not_comparable(rounds: list[str]) -> list[str]:
    """A line for each evaluation after the first: what the mark in the table means, what was
    otherwise, and what to do.
    """
    (first, *_), *others = evaluations(rounds) or [[""]]
    lines = []
    for number, together in enumerate(others, 1):
        manifests = (
            read_json_or_nothing(stage_dir(name, "evaluate") / "manifest.json")
            for name in (first, together[0])
        )
        ours, theirs = (manifest.get("evaluation", {}) for manifest in manifests)
        otherwise = (
            "; ".join(differences(ours, theirs))
            if ours and theirs
            else "a manifest.json does not say how"
        )
        lines.append(
            f"{OTHERWISE * number} {', '.join(together)} not comparable with {first}: evaluated otherwise ({otherwise}); "
            f"run `dvc repro {' '.join(f'evaluate@{name}' for name in (first, *together))}`"
        )
    return lines


def rows(rounds: list[str]) -> list[tuple[str, list[str]]]:
    """Title and a cell a round; a row of the evaluation's numbers once for each evaluation, so that
    none stands beside another's.
    """
    cells, apart = {name: cells_of(name) for name in rounds}, evaluations(rounds)
    return [
        (
            f"{title} {OTHERWISE * number}".strip(),
            [cells[name][title] if name in together else "-" for name in rounds],
        )
        for title, cell in ROWS.items()
        for number, together in enumerate(
            apart if len(apart) > 1 and "{evaluate." in cell else [rounds]
        )
    ]


def table(rounds: list[str], markdown: bool = False) -> Table:
    """One column a round."""
    shown = Table(box=MARKDOWN if markdown else SIMPLE_HEAD)
    for column in ("", *rounds):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for title, cells in rows(rounds):
        shown.add_row(title, *cells)
    return shown


def stage_of(title: str) -> str:
    """The stage that a row's first number is of."""
    return ROWS[title].partition("{")[2].partition(".")[0]


def cells_of(round_: str) -> dict[str, str]:
    """A round's cells by title."""
    metrics = {stage: Metrics(read_metrics(stage_dir(round_, stage))) for stage in STAGES}
    texts = {title: cell.format_map(metrics) for title, cell in ROWS.items()}
    return {
        title: text if any(sign.isdigit() for sign in text) else "-"
        for title, text in texts.items()
    }


def read_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json of a stage's folder, empty when there is none."""
    return read_json_or_nothing(folder / "metrics.json")


def read_json_or_nothing(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def verdict(rounds: list[str]) -> list[str]:
    """A line a round: which of SFT, reward model and PPO is at fault, by the first gate that is
    shut, and what was let through.
    """
    lines = []
    for name in rounds:
        verdicts = {gate: read_gate(name, gate) for gate in GATES}
        reached = {gate: found for gate, found in verdicts.items() if found}
        shut = next((gate for gate, found in reached.items() if not found["opened"]), None)
        let_through = "".join(
            f"; {gate} gate: {outcome(found)}"
            for gate, found in reached.items()
            if found["opened"] and not found["passed"]
        )
        if shut:
            lines.append(
                f"{name}: {stage_at_fault(name, shut, reached[shut])}: {'; '.join(failed_checks(reached[shut]))}{let_through}"
            )
        elif len(reached) == len(GATES):
            lines.append(f"{name}: all gates {'opened' if let_through else 'passed'}{let_through}")
        else:
            lines.append(
                f"{name}: has not reached the {next(gate for gate in GATES if gate not in reached)} gate{let_through}"
            )
    return lines


def stage_at_fault(round_: str, gate: str, verdict: Mapping[str, Any]) -> str:
    """Who is at fault; nobody where a policy that is good in itself may be worse than the champion."""
    if {check["metric"] for check in verdict["checks"] if not check["passed"]} == {CHAMPION}:
        return "not promoted, the champion stays"
    return f"{GATES[gate].format(algorithm=algorithm(round_))} is at fault"


def algorithm(round_: str) -> str:
    """What made the policy, as the field writes it."""
    made_by: str = read_json_or_nothing(stage_dir(round_, "ppo") / "manifest.json").get(
        "algorithm", "ppo"
    )
    return made_by.upper() if made_by != "best_of_n" else "best-of-n"


def outcome(verdict: Mapping[str, Any]) -> str:
    """How a gate ended, and who has decided so where its policy is not to block."""
    failed = ", ".join(format_check(check) for check in verdict["checks"] if not check["passed"])
    if verdict["passed"]:
        return "passed"
    if approval := verdict["approval"]:
        return f"{'approved' if approval['approved'] else 'refused'} by {approval['by']} ({approval['reason']}): {failed}"
    return f"{'warned of' if verdict['opened'] else 'failed'}: {failed}"


def markdown(rounds: list[str]) -> str:
    """The table and the verdicts, for reports/summary.md and docs/default.md."""
    return "\n".join(
        [
            drawn(table(rounds, markdown=True)),
            "",
            *(f"- {line}" for line in not_comparable(rounds) + verdict(rounds)),
            "",
        ]
    )


def text(rounds: list[str]) -> str:
    """The same for a terminal, and where to look next."""
    return "\n".join([drawn(table(rounds)), "", *not_comparable(rounds), *verdict(rounds), NEXT])


def write(rounds: list[str]) -> None:
    write_text(SUMMARY, markdown(rounds))
