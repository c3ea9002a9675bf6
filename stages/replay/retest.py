"""Retests of badcases, and what a round repaired: does a new response fail in the same way, and do
earlier exploits still reverse pairs?
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.lib.core.files import is_placeholder, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.rows import PreferencePair, PromptRow, RewardScores, read_rows
from stages.lib.core.types import ScoreFunction
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.stats import interval_names, mean, paired_bootstrap, with_interval
from stages.replay.badcases import Badcase, Cause, Retest, State
from stages.replay.exploits import Exploit, pairs_flipped
from stages.replay.mining import CAUSES, BadcaseThresholds, PolicySample
from stages.replay.sampler import Sampler, compared_samples, score_without_exploits


def retest(
    badcases: Sequence[Badcase],
    samples: Sequence[Sequence[PolicySample]],
    ranked: Sequence[bool],
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """The badcases with one more retest, and the state that follows from it.

    Some pass by chance, since sampling is random: compare with the retest by a badcase's own round.

    Args:
        samples: for each badcase new responses of `round_`'s policy, with the badcase's exploits.
        ranked: for each badcase False if the reward model does not put the better answer first.
    """
    retests = [
        Retest(
            round=round_,
            fired=sum(still_fails(case, sample, limits) for sample in case_samples),
            of=len(case_samples),
            ranked=is_ranked,
        )
        for case, case_samples, is_ranked in zip(badcases, samples, ranked, strict=True)
    ]
    return [case.with_retest(result) for case, result in zip(badcases, retests, strict=True)]


def comparison_response(case: Badcase) -> str | None:
    """The text that the jury compares a new response with; None if the cause needs no jury.

    SFT's response, if the jury had preferred it; for a report the better answer, or else the
    reported one.
    """
    if case.cause is Cause.human:
        return case.better or case.response
    return case.sft if case.cause is Cause.judge_loses else None


def still_fails(case: Badcase, sample: PolicySample, limits: BadcaseThresholds) -> bool:
    """Whether a new response fails as the badcase did.

    For a report: the jury finds it worse than the better answer, or not better than the bad one.
    """
    if case.cause is not Cause.human:
        return CAUSES[case.cause](sample, limits) is not None
    return sample.votes[JURY] == 0 if case.better else sample.votes[JURY] != 1


def count_by_cause(badcases: Sequence[Badcase], state: State) -> dict[str, int]:
    return dict(Counter(case.cause.value for case in badcases if case.state is state))


def resample_and_retest(
    badcases: list[Badcase],
    sampler: Sampler,
    jury: Jury,
    seed: int,
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """Retest badcases with this round's models; the policy answers each replay.tries times."""
    if not badcases:
        return []
    tries = limits.replay.tries
    repeated = [case for case in badcases for _ in range(tries)]
    rows: list[PromptRow] = [{"id": case.prompt_id, "prompt": case.prompt} for case in repeated]
    responses = sampler.policy([case.prompt for case in repeated], seed)
    rivals = [comparison_response(case) for case in repeated]
    samples = compared_samples(rows, responses, rivals, "again", jury)
    samples = score_without_exploits(samples, [case.exploits for case in repeated], sampler.scorer)
    samples_by_case = [samples[start : start + tries] for start in range(0, len(samples), tries)]

    misranked = misranked_badcases(badcases, sampler.scorer) if sampler.scorer else set()
    ranked = [case.id not in misranked for case in badcases]
    return retest(badcases, samples_by_case, ranked, limits, round_)


def misranked_badcases(badcases: Sequence[Badcase], score: ScoreFunction) -> set[str]:
    """The ids of those whose better answer the reward model does not put first."""
    paired = [case for case in badcases if case.better is not None]
    prompts = [case.prompt for case in paired]
    better = score(prompts, [case.better or "" for case in paired])
    bad = score(prompts, [case.response for case in paired])
    return {case.id for case, a, b in zip(paired, better, bad, strict=True) if a <= b}


def repair_metrics(before: list[Badcase], retested: list[Badcase]) -> dict[str, Any]:
    """How many badcases of all earlier rounds this round repaired.

    guarded: those that were repaired before, and must stay so (`regressed` counts the others).
    """
    pairs = list(zip(before, retested, strict=True))
    guarded = [now for then, now in pairs if then.guarded]
    others = [now for then, now in pairs if not then.guarded]
    return {
        "retested": len(others),
        "repaired": sum(case.state is State.repaired for case in others),
        "repaired_by_cause": count_by_cause(others, State.repaired),
        "repaired_by_chance": sum(case.by_chance for case in others),
        "guarded": len(guarded),
        "regressed": sum(case.state is State.regressed for case in guarded),
    }


def chosen_scores(reward: Path) -> dict[str, float]:
    """Calibrated scores of the held-out pairs' chosen texts by the pairs' ids, from `reward`."""
    rows = read_rows(RewardScores, reward / "scores.jsonl")
    return {row["id"]: row["chosen"] for row in rows}


def exploit_metrics(
    params: Params,
    round_: str,
    suffixes: list[str],
    sampler: Sampler,
    held_out: list[PreferencePair],
) -> dict[str, float | None]:
    """How often exploits, appended to the rejected text, reverse a held-out pair.

    `reversed_before`: the previous round's exploits under its reward model; `reversed_after`: the
    same under this round's; `reversed_fall`: the difference, with its 95% interval; `reversed_now`:
    this round's exploits (`suffixes`) under this round's. Null if there are no exploits.
    """
    previous = Path(params.rounds[round_].previous)
    chosen = chosen_scores(stage_dir(round_, "reward"))
    earlier: list[str] = []
    before, after = [], []
    if not is_placeholder(previous / "replay/data"):
        rows = read_rows(Exploit, previous / "replay/data/exploits.jsonl")
        earlier = [row["suffix"] for row in rows]
    if earlier:
        previous_scorer = RewardScorer(previous / "reward/model", params)
        previous_chosen = chosen_scores(previous / "reward")
        before = pairs_flipped(earlier, held_out, previous_scorer, previous_chosen)
        after = pairs_flipped(earlier, held_out, sampler.scorer, chosen)
    now = pairs_flipped(suffixes, held_out, sampler.scorer, chosen)
    falls = [[float(b) - a] for b, a in zip(before, after, strict=True)]
    fall: dict[str, float | None] = {**dict.fromkeys(interval_names("reversed_fall"))}
    if falls:
        interval = paired_bootstrap(falls, params.evaluate.bootstrap_resamples, params.seed)
        fall = {**with_interval("reversed_fall", interval)}
    shares = {"reversed_before": before, "reversed_after": after, "reversed_now": now}
    return {name: mean(outcomes) if outcomes else None for name, outcomes in shares.items()} | fall
