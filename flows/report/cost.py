"""The cost of a round per stage: minutes, tokens.

Only what the stages' files contain is shown; an unknown amount stays unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from flows.report import round_files
from flows.report.round_data import RoundResults
from stages.lib.core.files import work_dir
from stages.lib.core.rows import ClockRow, read_rows

Amount = float | None
# The models that `evaluate` samples with all samples per prompt; PPO's checkpoints have fewer
EVALUATED_MODELS = ("base", "sft", "ppo", "champion", "equal_kl")
JUDGE_ROWS = {
    "judges: input tokens": "tokens_in",
    "judges: output tokens": "tokens_out",
    "judges: price": "cost",
}


@dataclass(frozen=True)
class CostRow:
    """A row of the cost table.

    amounts: by stage. estimated: the stages whose amount is not exact.
    """

    title: str
    amounts: Mapping[str, Amount]
    estimated: frozenset[str] = field(default_factory=frozenset)

    @property
    def known(self) -> dict[str, float]:
        return {stage: amount for stage, amount in self.amounts.items() if amount is not None}

    def cell(self, stage: str) -> str:
        return format_amount(self.amounts.get(stage), stage in self.estimated)

    @property
    def total(self) -> str:
        if not self.known:
            return "-"
        return format_amount(sum(self.known.values()), bool(self.estimated & set(self.known)))


def cost_rows(results: RoundResults) -> list[CostRow]:
    """Minutes and tokens of a round; rows for judges only if a judge reports its usage."""
    minutes = {
        stage: taken / 60
        for stage in round_files.STAGES
        if (taken := stage_seconds(results, stage)) is not None
    }
    generated = {"ppo": policy_tokens(results), "evaluate": evaluation_tokens(results)}
    # PPO's curves have the mean length of each update; without them it is that of one update
    exact = "response_length" in results.curves
    rows = [
        CostRow("minutes", minutes),
        CostRow("tokens trained on", {"sft": sft_tokens(results)}, estimated=frozenset({"sft"})),
        CostRow("tokens generated", generated, estimated=frozenset(() if exact else ("ppo",))),
    ]
    judge_rows = (
        CostRow(
            title,
            {
                stage: judge_usage(results, stage, key)
                for stage in ("annotate", "evaluate", "replay")
            },
        )
        for title, key in JUDGE_ROWS.items()
    )
    return [*rows, *(row for row in judge_rows if row.known)]


def stage_seconds(results: RoundResults, stage: str) -> Amount:
    """Seconds of the run that made the stage's results; without its provenance, the time from the
    first to the last row of its clock.jsonl.
    """
    if stage not in results.locks:  # the clock may be that of an earlier run
        return None
    if stage in results.provenance:
        return results.provenance[stage].seconds
    clock = work_dir(results.name, stage) / "clock.jsonl"
    rows = read_rows(ClockRow, clock, f"rm {clock}") if clock.exists() else []
    times = [row["time"] for row in rows]
    # the clock may have been set back in between
    return times[-1] - times[0] if len(times) > 1 and times[0] <= times[-1] else None


def sft_tokens(results: RoundResults) -> Amount:
    """Prompt and completion tokens that SFT trained on.

    An estimate: the tokens of one epoch, times the rows of all steps, over the rows of one epoch.
    Which rows were in the last, partial epoch is not recorded.
    """
    sft, config = results.metrics["sft"], results.settings("sft").get("sft")
    if not sft.get("train_rows") or "steps" not in sft or not config:
        return None
    batch_size = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    return float(sft["train_tokens"] * (sft["steps"] * batch_size) / sft["train_rows"])


def policy_tokens(results: RoundResults) -> Amount:
    """Tokens of PPO's episodes, by the mean response length of all updates; without curves, by that
    of the updates around the selected policy.
    """
    ppo, lengths = results.metrics["ppo"], results.curves.get("response_length")
    length = fmean(lengths) if lengths else ppo.get("response_length")
    return ppo["episodes"] * length if "episodes" in ppo and length is not None else None


def evaluation_tokens(results: RoundResults) -> Amount:
    """Tokens of the responses to the evaluation prompts, of all models and checkpoints."""
    metrics, config = results.metrics["evaluate"], results.settings("evaluate").get("evaluate")
    if "prompts" not in metrics or not config:
        return None
    # If the policy is not scaled, the checkpoint of its update has its weights: evaluate reuses its
    # responses
    ppo = results.metrics["ppo"]
    is_scaled = ppo.get("policy_scale", 1) != 1
    reused = "" if is_scaled else f"step_{ppo.get('policy_update', 0):05d}"
    tokens_per_prompt = [
        metrics[name]["length"] * config["samples_per_prompt"]
        for name in EVALUATED_MODELS
        if name in metrics
    ]
    tokens_per_prompt += [
        row["length"] * config["checkpoint_samples_per_prompt"]
        for name, row in metrics.get("checkpoints", {}).items()
        if name != reused
    ]
    return float(metrics["prompts"] * sum(tokens_per_prompt))


def judge_usage(results: RoundResults, stage: str, key: str) -> Amount:
    """The sum of a usage counter over the judges of a stage that report it."""
    judges = judge_metrics(results.metrics[stage])
    amounts = [judge[key] for judge in judges if judge.get(key) is not None]
    return sum(amounts) if amounts else None


def judge_metrics(metrics: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Where usage is counted: at the top for the one judge of annotate, with its revisions apart;
    per judge for a jury.
    """
    revisions = metrics.get("revisions", {})
    return [metrics, revisions, *metrics.get("jury", {}).get("alone", {}).values()]


def format_amount(amount: Amount, estimated: bool) -> str:
    """`1,234`, `1.5`, `about 580` for an estimate (two digits), `-` if unknown."""
    if amount is None:
        return "-"
    if estimated:
        return f"about {float(f'{amount:.2g}'):,.0f}"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
