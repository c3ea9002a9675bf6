"""Which stage is at fault, how sure that is, and what to do next: on top of the report, at the end
of a run, and in `rondo status`.

The first failed gate in the order of the pipeline names the stage at fault, since all later numbers
build on that stage. A gate that failed and let the run continue (`policy: warn`) counts as well.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.core.config import options_of
from flows.core.locks import Locks
from flows.core.tables import format_number, interval
from flows.execution.worktree import run_of_folder
from flows.report.round_files import (
    known_rounds,
    read_manifest,
    read_metrics,
    settings_of,
    verdicts,
)
from stages.gate.verdict import look_up, passed_or_approved
from stages.lib.core.ended_rounds import has_ended
from stages.lib.core.files import stage_dir
from stages.lib.core.types import Metrics

CHAMPION = "evaluate.win_rate_champion_low"
WIN_RATE = "evaluate.win_rate_low"
EQUAL_KL = "win_rate_champion_equal_kl"
SUBJECTS = {"sft": "SFT", "reward": "the reward model", "promote": "{algorithm}"}
PASSED = "passed"  # the outcome of a gate
WASTES_KL = 0.5  # KL efficiency below which training, not the reward model, limits a policy
NEXT_ROUND = "then train a round on the failures of this one"
# Where it stands on how many texts the numbers of a stage were measured
COUNTS = {
    "sft": ("prepare", "eval_prompts", "prompts"),
    "sft loss": ("prepare", "sft_eval", "held-out demonstrations"),
    "reward": ("reward", "pairs", "held-out pairs"),
    "battery": ("reward", "pairs", "held-out pairs"),
    "evaluate": ("evaluate", "prompts", "prompts"),
}


@dataclass(frozen=True)
class Fault:
    """A failed gate.

    subject: the model that it is about. checks: the failed ones. cause: what is wrong by the first
    of them. advice: what to do. setting: what to try first, as `--set` takes it; may be empty.
    """

    gate: str
    subject: str
    checks: Sequence[Metrics]
    cause: str
    advice: str
    setting: str

    @property
    def text(self) -> str:
        """The cause with its number, and how many other checks failed."""
        first, others = self.checks[0], len(self.checks) - 1
        number = "missing" if first["value"] is None else format_number(first["value"])
        end = ", low end" if first["metric"].endswith("_low") else ""
        more = f", and {others} more failed" if others else ""
        return f"{self.cause} ({first['name']}{end}: {number}, wanted {first['threshold']}{more})"


@dataclass(frozen=True)
class Answer:
    """What a round says.

    title: the stage at fault, or that there is none. complete: all gates were reached. faults: the
    failed gates, in the order of the pipeline. certainty: how sure it is. next_step: what to do,
    and command: the line to copy for it. notes: gates that a person decided on or that were not
    judged. effect: whether the round made a better policy than the champion. limit: whether the
    training or the reward model limits the policy. The last three may be empty.
    """

    round: str
    title: str
    complete: bool
    faults: Sequence[Fault]
    certainty: str
    next_step: str
    command: str
    notes: Sequence[str]
    effect: str
    limit: str

    @property
    def text(self) -> str:
        """The answer in one line, without the round's name."""
        parts = [self.title]
        if self.faults:
            first, *later = self.faults
            parts = [f"{self.title}: {first.text}", f"{self.next_step}: `{self.command}`"]
            parts += [f"Also at fault: {fault.subject}: {fault.text}" for fault in later]
        more = [f"{text[0].upper()}{text[1:]}" for text in (self.effect, self.limit) if text]
        return ". ".join([*parts, *self.notes, *more])


def headline(rounds: Sequence[str], locks: Locks) -> str:
    """One line about these rounds: the stage at fault first, and what to do."""
    if not rounds:
        return "No stage has results yet."
    decided = deciding_round(rounds, locks)
    return f"{f'{decided}: ' if len(rounds) > 1 else ''}{answer(decided, locks).text}"


def deciding_round(rounds: Sequence[str], locks: Locks) -> str:
    """The first round that has not reached all its gates, else the last one."""
    reached = (name for name in rounds if len(verdicts(name, locks)) < len(SUBJECTS))
    return next(reached, rounds[-1])


def gates_failed(rounds: Sequence[str], locks: Locks) -> bool:
    """Whether a gate of these rounds failed and no person approved it, also with policy `warn`."""
    return any(
        not passed_or_approved(verdict)
        for name in rounds
        for verdict in verdicts(name, locks).values()
    )


def verdict_lines(rounds: Sequence[str], locks: Locks) -> list[str]:
    """The answer of each round in a line."""
    return [f"{name}: {answer(name, locks).text}" for name in rounds]


def answer(round_: str, locks: Locks) -> Answer:
    """The stage at fault of a round, how sure that is, and the next step."""
    by_gate = verdicts(round_, locks)
    faults = faults_of(round_, by_gate, locks)
    notes = [
        f"{gate} gate: {outcome(verdict)}"
        for gate, verdict in by_gate.items()
        if passed_or_approved(verdict) and outcome(verdict) != PASSED
    ]
    missing = next((gate for gate in SUBJECTS if gate not in by_gate), "")
    if faults:
        title = title_of(faults)
    elif missing:
        title = f"not finished: the {missing} gate was not reached"
    else:
        title = "no gate stopped the run" if notes else "all gates passed"
    next_step, command = next_steps(round_, faults, not missing)
    return Answer(
        round=round_,
        title=title,
        complete=not missing,
        faults=faults,
        certainty=certainty_of(faults[0].checks[0] if faults else None, round_, locks),
        next_step=next_step,
        command=command,
        notes=notes,
        effect=effect(round_, locks),
        limit=limit_of_policy(round_, locks),
    )


def title_of(faults: Sequence[Fault]) -> str:
    """`SFT is at fault`, with ` first` if other gates failed as well."""
    first = faults[0]
    # a policy may be good and not beat the champion
    if {check["metric"] for check in first.checks} == {CHAMPION}:
        return "not promoted, the champion stays"
    return f"{first.subject} is at fault{' first' if len(faults) > 1 else ''}"


def faults_of(round_: str, by_gate: Mapping[str, Mapping[str, Any]], locks: Locks) -> list[Fault]:
    """The gates that failed and that no person approved."""
    faults = []
    for gate, verdict in by_gate.items():
        failed = [check for check in verdict["checks"] if not check["passed"]]
        if failed and not passed_or_approved(verdict):
            cause, advice, setting = remedy(round_, failed[0], locks)
            subject = SUBJECTS[gate].format(algorithm=algorithm(round_, locks))
            faults.append(Fault(gate, subject, failed, cause, advice, setting))
    return faults


def remedy(round_: str, check: Metrics, locks: Locks) -> tuple[str, str, str]:
    """Cause, advice and setting of a failed check.

    A policy that does not beat SFT has learnt too little, or the wrong thing: the reward model's
    score shows which.
    """
    evaluate = read_metrics(round_, "evaluate", locks)
    mean = look_up(evaluate, "win_rate")
    before, after = (look_up(evaluate, f"{model}.score") for model in ("sft", "ppo"))
    lost = check["metric"] == WIN_RATE and mean <= check["limit"]
    if not lost or not (math.isfinite(before) and math.isfinite(after)):
        return check["fault"], check["next_step"], check["setting"]
    if after > before:
        samples = stage_dir(round_, "evaluate") / "samples.jsonl"
        cause = (
            f"the reward model's score rose from {before:.2f} to {after:.2f}, and the judges do "
            "not prefer its responses: it may exploit the reward model"
        )
        return cause, f"Read {samples}, {NEXT_ROUND}", ""
    cause = (
        "the reward model's score, which it maximises, did not rise: from "
        f"{before:.2f} to {after:.2f}"
    )
    return cause, "Raise ppo.total_episodes, or lower ppo.kl_coef", ""


def next_steps(round_: str, faults: Sequence[Fault], complete: bool) -> tuple[str, str]:
    """What to do after this round, and the command for it that is right in this folder.

    Args:
        complete: whether the round has reached all its gates.
    """
    run = run_of_folder()
    next_round = f"{f'git merge runs/{run} && ' if run else ''}rondo next-round"
    if not faults:
        if complete:
            return "Train a round on the failures of this one", next_round
        return "Run what is left", f"rondo run{f' --continue {run}' if run else ''}"
    first = faults[0]
    if first.advice.endswith(NEXT_ROUND) and complete:
        return first.advice, next_round
    start = ["rondo", "run", *(["--isolated", *options_of(settings_of(round_))] if run else [])]
    again = ["--rerun", round_] if has_ended(round_) else []
    if first.setting:
        return change_of(first.setting, round_), shlex.join(
            [*start, *again, "--set", first.setting]
        )
    return f"{first.advice}. Then run again", shlex.join([*start, *again])


def change_of(setting: str, round_: str) -> str:
    """A setting as a change of the round's own value: `Try sft.max_steps 8 instead of 4`."""
    key, _, value = setting.partition("=")
    return f"Try {key} {value} instead of {look_up(settings_of(round_).model_dump(), key)}"


def certainty_of(check: Metrics | None, round_: str, locks: Locks) -> str:
    """How sure a failed check is; without one, the win rate. Empty if there is no number yet."""
    if check is None:
        evaluate = read_metrics(round_, "evaluate", locks)
        if (ends := read_interval(evaluate, "win_rate")) is None:
            return ""
        mean, low, high = ends
        judges = " and ".join(sorted(evaluate.get("jury", {}).get("alone", {})))
        prompts = f" on {evaluate['prompts']} prompts" if "prompts" in evaluate else ""
        decided = "Sure" if low > 0.5 or high < 0.5 else "Not sure that it beats SFT"
        return (
            f"{decided}: win rate against SFT {interval(mean, low, high)}, 95% interval{prompts}"
            f"{judges and f', by the judges {judges}'}. One training run: another seed gives "
            "another policy"
        )
    if check["value"] is None:
        return "There is no number"
    counted, ends = count_of(check, round_, locks), interval_of(check, round_, locks)
    if ends is None:
        value, limit = check["value"], check["limit"]
        far = abs(abs(value) - abs(limit)) > max(abs(value), abs(limit)) / 2
        return (
            f"{'Far from' if far else 'Close to'} its threshold, but one number{counted} without "
            "an interval: the same run with another seed (`--set seed=1`) shows its noise"
        )
    mean, low, high = ends
    shown = f"{interval(mean, low, high)}, 95% interval{counted}"
    if high < check["limit"]:
        return f"Sure: the whole interval is below {check['limit']:g}: {shown}"
    if mean < check["limit"]:
        return f"Likely: the mean fails, the upper end of the interval does not: {shown}"
    return f"Not sure: the mean passes, the lower end of the interval does not: {shown}"


def interval_of(check: Metrics, round_: str, locks: Locks) -> tuple[float, float, float] | None:
    """Mean, low and high end, if the check is of a lower end."""
    stage, _, name = check["metric"].partition(".")
    stem = name.removesuffix("_low")
    return read_interval(read_metrics(round_, stage, locks), stem) if stem != name else None


def read_interval(metrics: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Mean, low and high end of a metric; None if one was not measured."""
    mean, low, high = (look_up(metrics, f"{name}{end}") for end in ("", "_low", "_high"))
    numbers = all(isinstance(end, float | int) for end in (mean, low, high))
    return (mean, low, high) if numbers and not any(map(math.isnan, (mean, low, high))) else None


def count_of(check: Metrics, round_: str, locks: Locks) -> str:
    """` on 88 prompts`: on how many of what a number was measured; empty if that is unknown."""
    stage = check["metric"].partition(".")[0]
    if check["metric"].startswith("sft.loss"):
        stage = "sft loss"
    where, key, unit = COUNTS.get(stage, ("", "", ""))
    number = read_metrics(round_, where, locks).get(key) if where else None
    return "" if number is None else f" on {number} {unit}"


def effect(round_: str, locks: Locks) -> str:
    """Whether a round made a better policy than the champion at equal KL; empty if unknown."""
    metrics = read_metrics(round_, "evaluate", locks)
    if (ends := read_interval(metrics, EQUAL_KL)) is None:
        return ""
    mean, low, high = ends
    verdict = "helped" if low > 0.5 else "hurt" if high < 0.5 else "no difference shown"
    needed = metrics.get(f"{EQUAL_KL}_prompts_needed")
    prompts = f"; about {needed} prompts would decide" if needed else ""
    if needed and "prompts" in metrics:
        prompts += f", not {metrics['prompts']}"
    caution = cautions(round_, locks) if verdict == "helped" else ""
    against = f"at equal KL, {round_} against {metrics['champion_round']}"
    return f"{against}: {verdict} (win rate {interval(mean, low, high)}{prompts}){caution}"


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


def limit_of_policy(round_: str, locks: Locks) -> str:
    """What the policy's KL is worth, and so what limits it; empty if unknown."""
    metrics = read_metrics(round_, "evaluate", locks)
    if (ends := read_interval(metrics, "kl_efficiency")) is None:
        return ""
    value, name, worth = ends[0], algorithm(round_, locks), f"KL efficiency {interval(*ends)}"
    if not value:
        return f"{name} paid {metrics['ppo']['kl']:.1f} nats for no reward ({worth})"
    first, second = "its training", "the reward model"
    if value >= WASTES_KL:
        first, second = second, first
    return (
        f"{name} paid {1 / value:.1f} times the KL at which best-of-n of SFT has its reward "
        f"({worth}): {first} limits it more than {second}"
    )


def algorithm(round_: str, locks: Locks) -> str:
    """The algorithm that trained the policy, as the literature spells it."""
    name: str = read_manifest(round_, "ppo", locks).get("algorithm", "ppo")
    return name.upper() if name != "best_of_n" else "best-of-n"


def outcome(verdict: Mapping[str, Any]) -> str:
    """How a gate ended, in words: passed, not judged and why, who approved or refused it and why,
    or failed.
    """
    if reason := verdict.get("not_judged"):
        return f"not judged ({reason})"
    if verdict["passed"]:
        return PASSED
    if approval := verdict["approval"]:
        decision = "approved" if approval["approved"] else "refused"
        return f"{decision} by {approval['by']}: {approval['reason']}"
    return (
        "failed; the run went on, since the gate only warns"
        if verdict["may_continue"]
        else "failed"
    )
