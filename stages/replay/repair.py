"""Rows for the next round out of badcases: pairs for the reward model, demonstrations for SFT, prompts for PPO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from stages.badcases import Badcase, Cause, State
from stages.judges import Judged, judge, outcome
from stages.prompts import Prompt
from stages.records import Row
from stages.replay.exploits import without

PAIRED = (Cause.judge_loses, Cause.blind_spot, Cause.repetition, Cause.human)
GOOD = 0.5  # plain sentiment (-1..1) from which an answer is worth imitating


@dataclass(frozen=True)
class Answer:
    """A candidate of SFT. nll: nats a token under the reference."""

    text: str
    judged: Judged
    nll: float


def best_answer(answers: Sequence[Answer], avoid: Sequence[str], repetition: float, nll: float) -> Answer | None:
    """The answer that the judges like most: of those without an exploit, much repetition, or an NLL above `nll` (garbled by chance)."""
    sound = [
        a
        for a in answers
        if a.text.strip() and a.nll <= nll and a.judged.repetition < repetition and not any(exploit in a.text for exploit in avoid)
    ]
    return max(sound, key=lambda a: a.judged.sentiment + a.judged.sentiment_plain, default=None)


def fluent_nll(answers: Sequence[Answer]) -> float:
    """The NLL that three quarters of the answers do not exceed."""
    return quantiles([a.nll for a in answers], n=4)[2] if len(answers) > 1 else float("inf")


def repair(
    badcases: Sequence[Badcase], best: Mapping[str, Answer], tie_margin: float
) -> tuple[list[Badcase], list[Row], list[Row], list[Row]]:
    """(badcases, now replayed, with their better answers; pairs; demonstrations; prompts). `best` is by badcase id.

    A pair is made where the judges prefer the better answer to the bad one, the latter read without its exploits; where a person has given
    the better answer, always. A demonstration is made where the better answer is good in itself; the prompt goes to PPO again in any case.
    """
    replayed: list[Badcase] = []
    pairs: list[Row] = []
    demonstrations: dict[tuple[str, str], Row] = {}
    prompts: dict[str, Row] = {}
    for case in badcases:
        tags = {"id": f"replay-{case.id}", "prompt": case.prompt, "source": "replay", "badcase": case.id}
        prompts.setdefault(key(case.prompt), tags)
        better = case.better or preferred(case, best.get(case.id), tie_margin)
        shown = case.better or worth_imitating(best.get(case.id))
        if better:
            pairs.append({**tags, "chosen": better, "rejected": case.response})
        if shown:
            demonstrations.setdefault((key(case.prompt), shown), {**tags, "completion": shown})
        replayed.append(case.model_copy(update={"better": better, "state": State.replayed}))
    return replayed, pairs, list(demonstrations.values()), list(prompts.values())


def preferred(case: Badcase, answer: Answer | None, tie_margin: float) -> str | None:
    """The answer's text, where it is of use against this cause, and the judges prefer it."""
    if answer is None or case.cause not in PAIRED:
        return None
    bare = judge([case.prompt], [without(case.exploits, case.response)])[0]
    return answer.text if outcome(answer.judged, bare, tie_margin) == 1 else None


def worth_imitating(answer: Answer | None) -> str | None:
    return answer.text if answer and answer.judged.sentiment_plain >= GOOD else None


def key(prompt: Prompt) -> str:
    return str(prompt)


def capped(rows: list[Row], human: int, share: float) -> list[Row]:
    """At most so many rows that they are `share` of all together with the `human` ones."""
    return rows if share >= 1 else rows[: int(human * share / (1 - share))]
