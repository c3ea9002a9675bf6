"""Rows for the next round out of badcases: pairs for the reward model, demonstrations for SFT, prompts for PPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from stages.judges import Judged, judge, outcome
from stages.prompts import Prompt
from stages.records import Row
from stages.replay.exploits import without

PAIRED = ("judge_loses", "blind_spot", "repetition")
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


def repair(badcases: list[Row], best: dict[str, Answer], tie_margin: float) -> tuple[list[Row], list[Row], list[Row]]:
    """(pairs, demonstrations, prompts) of badcases, whose `better` and `state` it fills in; `best` is by badcase id.

    A pair is made where the judges prefer the better answer to the bad one, the latter read without its exploits.
    A demonstration is made where the better answer is good in itself; the prompt goes to PPO again in any case.
    """
    pairs: list[Row] = []
    demonstrations: dict[tuple[str, str], Row] = {}
    prompts: dict[str, Row] = {}
    for case in badcases:
        bare, prompt, better = without(case["exploits"], case["response"]), case["prompt"], best.get(case["id"])
        tags = {"id": f"replay-{case['id']}", "prompt": prompt, "source": "replay", "badcase": case["id"]}
        prompts.setdefault(key(prompt), tags)
        if better and case["cause"] in PAIRED and outcome(better.judged, judge([prompt], [bare])[0], tie_margin) == 1:
            case["better"] = better.text
            pairs.append({**tags, "chosen": better.text, "rejected": case["response"]})
        if better and better.judged.sentiment_plain >= GOOD:
            demonstrations.setdefault((key(prompt), better.text), {**tags, "completion": better.text})
        case["state"] = "replayed"
    return pairs, list(demonstrations.values()), list(prompts.values())


def key(prompt: Prompt) -> str:
    return str(prompt)


def capped(rows: list[Row], human: int, share: float) -> list[Row]:
    """At most so many rows that they are `share` of all together with the `human` ones."""
    return rows if share >= 1 else rows[: int(human * share / (1 - share))]
