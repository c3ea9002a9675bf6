"""Better answers than the bad ones: the jury's best of several by SFT. No model is here but what
the jury asks.
"""

from collections.abc import Mapping, Sequence
from statistics import quantiles

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.core.types import Prompt
from stages.lib.judging.copeland import all_pairs, copeland_scores
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.metrics.sentiment import sentiment_plain
from stages.lib.metrics.text import repetition_n
from stages.replay.badcases import Badcase, Cause
from stages.replay.exploits import strip_exploits
from stages.replay.sampler import Candidate, Drawn
from stages.replay.training_rows import BetterAnswer

PAIRED = (Cause.judge_loses, Cause.blind_spot, Cause.repetition, Cause.human)
# plain sentiment (-1..1) from which an answer is worth imitating, where the lexicon is a judge
GOOD = 0.5


def better_answers(
    badcases: Sequence[Badcase],
    drawn: Drawn,
    jury: Jury,
    replay: ReplayParams,
    avoid: Sequence[str],
    by_lexicon: bool,
) -> dict[str, BetterAnswer]:
    """By badcase id; none where no answer of SFT is sound. avoid: exploits."""
    prompts = {str(case.prompt): case.prompt for case in badcases}
    most = fluent_nll([answer for answers in drawn.values() for answer in answers])
    kept = {
        key: acceptable_answers(answers, avoid, replay.repetition, most)
        for key, answers in drawn.items()
    }
    best = best_of(prompts, kept, jury)
    good = {
        key
        for key, (text, points) in best.items()
        if worth_imitating(prompts[key], text, points, len(kept[key]), by_lexicon)
    }
    paired = [
        (case, best[str(case.prompt)][0])
        for case in badcases
        if case.cause in PAIRED and str(case.prompt) in best
    ]
    won = jury.compare(
        [
            Comparison(case.prompt, text, strip_exploits(case.exploits, case.response))
            for case, text in paired
        ]
    )[JURY]
    preferred = {case.id for (case, _), vote in zip(paired, won, strict=True) if vote == 1}
    return {
        case.id: BetterAnswer(best[key][0], preferred=case.id in preferred, good=key in good)
        for case in badcases
        if (key := str(case.prompt)) in best
    }


def fluent_nll(answers: Sequence[Candidate]) -> float:
    """The NLL that three quarters of the answers do not exceed."""
    return quantiles([each.nll for each in answers], n=4)[2] if len(answers) > 1 else float("inf")


def acceptable_answers(
    answers: Sequence[Candidate], avoid: Sequence[str], repetition: float, nll: float
) -> list[str]:
    """Those without an exploit, much repetition, or an NLL above `nll` (garbled by chance); each
    text once.
    """
    kept = (
        each.text
        for each in answers
        if each.text.strip()
        and each.nll <= nll
        and repetition_n(each.text, 3) < repetition
        and not any(ending in each.text for ending in avoid)
    )
    return list(dict.fromkeys(kept))


def best_of(
    prompts: Mapping[str, Prompt], answers: Mapping[str, Sequence[str]], jury: Jury
) -> dict[str, tuple[str, float]]:
    """For each prompt that has any the answer with the highest Copeland score (the first of
    equals), and that score.
    """
    comparisons = [
        Comparison(prompts[key], texts[i], texts[j])
        for key, texts in answers.items()
        for i, j in all_pairs(len(texts))
    ]
    votes = iter(jury.compare(comparisons)[JURY])
    best = {}
    for key, texts in answers.items():
        points = copeland_scores(len(texts), {pair: next(votes) for pair in all_pairs(len(texts))})
        if texts:
            index = max(range(len(texts)), key=points.__getitem__)
            best[key] = (texts[index], points[index])
    return best


def worth_imitating(
    prompt: Prompt, text: str, points: float, answers: int, by_lexicon: bool
) -> bool:
    """By the lexicon, where it is a judge; else an answer that the jury prefers to all others, of
    which there is one at least.
    """
    if by_lexicon:
        return sentiment_plain([prompt], [text])[0] >= GOOD
    return answers > 1 and points == answers - 1
