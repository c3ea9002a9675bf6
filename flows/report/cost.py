"""What a round has cost, stage by stage: minutes, watt-hours, tokens. Only what the files say; what
they do not say is not guessed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from flows.report import summary
from flows.report.round_data import Round
from stages.lib.core.files import read_jsonl, work_dir

Amount = float | None
ANSWERED = (
    "base",
    "sft",
    "ppo",
    "champion",
)  # all passes of the evaluation; checkpoints have fewer
BILL = {
    "judges: tokens read": "tokens_in",
    "judges: tokens written": "tokens_out",
    "judges: price": "cost",
}


@dataclass(frozen=True)
class Line:
    """cells: by stage. about: the stages whose cell is not exact. unknown: what to say in place of
    a total.
    """

    title: str
    cells: Mapping[str, Amount]
    about: frozenset[str] = field(default_factory=frozenset)
    unknown: str = "-"

    @property
    def known(self) -> dict[str, float]:
        return {stage: amount for stage, amount in self.cells.items() if amount is not None}

    def cell(self, stage: str) -> str:
        return shown(self.cells.get(stage), stage in self.about)

    @property
    def total(self) -> str:
        return (
            shown(sum(self.known.values()), bool(self.about & set(self.known)))
            if self.known
            else self.unknown
        )


def lines(told: Round) -> list[Line]:
    """Minutes, energy and tokens of a round; those of judges where a judge counts them."""
    energy = {stage: note.watt_hours for stage, note in told.made.items()}
    written = {"ppo": written_by_policy(told), "evaluate": written_for_evaluation(told)}
    found = [
        Line(
            "minutes",
            {
                stage: taken / 60
                for stage in summary.STAGES
                if (taken := seconds(told, stage)) is not None
            },
        ),
        Line("watt-hours", energy, unknown="not readable" if energy else "-"),
        Line("tokens trained on", {"sft": trained_on(told)}, about=frozenset({"sft"})),
        Line(
            "tokens written",
            written,
            about=frozenset() if "response_length" in told.curves["ppo"] else frozenset({"ppo"}),
        ),
    ]
    bills = (
        Line(
            title, {stage: spent(told, stage, key) for stage in ("annotate", "evaluate", "replay")}
        )
        for title, key in BILL.items()
    )
    return [*found, *(line for line in bills if line.known)]


def seconds(told: Round, stage: str) -> Amount:
    """As the run that made it took them; else, by the clock beside its metrics, from its start to
    its last step.
    """
    if stage in told.made:
        return told.made[stage].seconds
    clock = work_dir(told.name, stage) / "clock.jsonl"
    times = [row["time"] for row in read_jsonl(clock, "")] if clock.exists() else []
    return times[-1] - times[0] if len(times) > 1 else None


def trained_on(told: Round) -> Amount:
    """SFT's, prompts and completions: of a pass over its rows as much as its steps had rows; which
    rows that were is not known.
    """
    sft, config = told.metrics["sft"], told.settings("sft").get("sft")
    if not sft.get("train_rows") or "steps" not in sft or not config:
        return None
    rows = (
        sft["steps"] * config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    )
    return float(sft["train_tokens"] * rows / sft["train_rows"])


def written_by_policy(told: Round) -> Amount:
    """PPO's episodes: the mean length of all updates by its curve, else that around the policy that
    was kept.
    """
    ppo, lengths = told.metrics["ppo"], told.curves["ppo"].get("response_length")
    length = fmean(lengths) if lengths else ppo.get("response_length")
    return ppo["episodes"] * length if "episodes" in ppo and length is not None else None


def written_for_evaluation(told: Round) -> Amount:
    """The models' answers to the frozen prompts; a checkpoint with the policy's weights gave none
    of its own.
    """
    found, config = told.metrics["evaluate"], told.settings("evaluate").get("evaluate")
    if "prompts" not in found or not config:
        return None
    kept = f"step_{told.metrics['ppo'].get('policy_update', 0):05d}"
    lengths = [
        found[name]["length"] * config["samples_per_prompt"] for name in ANSWERED if name in found
    ]
    steps = (row for name, row in found.get("checkpoints", {}).items() if name != kept)
    lengths += [row["length"] * config["checkpoint_samples_per_prompt"] for row in steps]
    return float(found["prompts"] * sum(lengths))


def spent(told: Round, stage: str, key: str) -> Amount:
    """What the judges of a stage have counted, those together that count; prices where one is set."""
    amounts = [bill[key] for bill in bills(told.metrics[stage]) if bill.get(key) is not None]
    return sum(amounts) if amounts else None


def bills(metrics: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Of the judge that annotates, or of those of a jury."""
    return [metrics, *metrics.get("jury", {}).get("alone", {}).values()]


def shown(amount: Amount, about: bool) -> str:
    if amount is None:
        return "-"
    if about:
        return f"about {float(f'{amount:.2g}'):,.0f}"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
