"""Badcases: responses of the policy to training prompts that show a failure, by cause.

judge_loses  the judges prefer SFT's response to the same prompt
blind_spot   the reward model likes it, but the judges find it negative, or without its exploits it would not like it
repetition   the text repeats its own 3-grams
no_eos       the response was cut off
kl_outlier   far from SFT, by the robust z-score of sequence KL
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from statistics import median

from stages.judges import Judged, outcome
from stages.params import ReplayParams
from stages.prompts import Prompt
from stages.records import Row

# of a normal distribution: standard deviation / median absolute deviation (Rousseeuw & Croux 1993)
MAD_TO_STD = 1.4826


@dataclass(frozen=True)
class Sample:
    """A response of the policy.

    score: calibrated; kl: nats a sequence; origin: PPO update, or "fresh"; sft: SFT's response; exploits: those in the
    response; bare: the score without them.
    """

    prompt_id: str
    prompt: Prompt
    response: str
    score: float
    kl: float
    ended: bool
    judged: Judged
    origin: int | str
    sft: str | None = None
    sft_judged: Judged | None = None
    exploits: tuple[str, ...] = ()
    bare: float | None = None


@dataclass(frozen=True)
class Limits:
    """What counts as a failure. kl: nats a sequence."""

    replay: ReplayParams
    kl: float
    tie_margin: float


def kl_limit(kls: list[float], outlier: float) -> float:
    """The KL (nats a sequence) at a robust z-score of `outlier`."""
    middle = median(kls)
    return middle + outlier * MAD_TO_STD * median(abs(kl - middle) for kl in kls)


# Each tells how bad a sample is, larger is worse, or None where the cause does not fire.
def judge_loses(sample: Sample, limits: Limits) -> float | None:
    if sample.sft_judged is None or outcome(sample.judged, sample.sft_judged, limits.tie_margin) != 0:
        return None
    return sample.sft_judged.sentiment - sample.judged.sentiment


def blind_spot(sample: Sample, limits: Limits) -> float | None:
    unloved = sample.judged.sentiment_plain < limits.replay.judge_low
    overpaid = sample.bare is not None and sample.bare < limits.replay.score_high
    return sample.score if sample.score >= limits.replay.score_high and (unloved or overpaid) else None


def repetition(sample: Sample, limits: Limits) -> float | None:
    return sample.judged.repetition if sample.judged.repetition >= limits.replay.repetition else None


def no_eos(sample: Sample, limits: Limits) -> float | None:
    return None if sample.ended else sample.score


def kl_outlier(sample: Sample, limits: Limits) -> float | None:
    return sample.kl if sample.kl > limits.kl else None


CAUSES: dict[str, Callable[[Sample, Limits], float | None]] = {
    each.__name__: each for each in (judge_loses, blind_spot, repetition, no_eos, kl_outlier)
}


def badcase_id(prompt: Prompt, response: str, cause: str) -> str:
    return hashlib.sha256(json.dumps([prompt, response, cause]).encode()).hexdigest()[:12]


def mine(samples: Iterable[Sample], limits: Limits, provenance: Row) -> list[Row]:
    """Badcases, at most replay.max_badcases: the causes take turns, each giving its worst first."""
    found: dict[str, dict[str, tuple[float, Row]]] = {cause: {} for cause in CAUSES}
    for sample in samples:
        for cause, severity in CAUSES.items():
            if (bad := severity(sample, limits)) is not None:
                row = badcase(sample, cause, provenance)
                found[cause][row["id"]] = (bad, row)
    ranked = ([row for _, row in sorted(rows.values(), key=lambda item: (-item[0], item[1]["id"]))] for rows in found.values())
    turns = (row for row in chain.from_iterable(zip_longest(*ranked)) if row)
    return [row for row, _ in zip(turns, range(limits.replay.max_badcases), strict=False)]


def badcase(sample: Sample, cause: str, provenance: Row) -> Row:
    return {
        "id": badcase_id(sample.prompt, sample.response, cause),
        "cause": cause,
        "state": "open",
        **provenance,
        "origin": sample.origin,
        "prompt_id": sample.prompt_id,
        "prompt": sample.prompt,
        "response": sample.response,
        "score": round(sample.score, 4),
        "kl": round(sample.kl, 4),
        "ended": sample.ended,
        **{name: round(value, 4) for name, value in asdict(sample.judged).items()},
        "exploits": list(sample.exploits) if cause == "blind_spot" else [],
        "sft": sample.sft,
        "better": None,
    }
