"""Better answers to badcases' prompts: the jury's best of several answers by SFT.

No model is loaded here; the jury may ask its own.
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
from stages.replay.sampler import Candidate, CandidatesByPrompt
from stages.replay.training_rows import BetterAnswer

# causes that give a preference pair: the jury can see in the two texts what was wrong
PAIRED = (Cause.judge_loses, Cause.blind_spot, Cause.repetition, Cause.human)
MIN_SENTIMENT = 0.5  # plain (-1..1), from which an answer is good if the lexicon is a judge


def better_answers(
    badcases: Sequence[Badcase],
    candidates: CandidatesByPrompt,
    jury: Jury,
    replay: ReplayParams,
    avoid: Sequence[str],
    by_lexicon: bool,
) -> dict[str, BetterAnswer]:
    """The jury's best answer by badcase id; none if no candidate is acceptable.

    Args:
        candidates: SFT's answers to each prompt.
        avoid: exploits, which an answer must not contain.
        by_lexicon: whether the lexicon is a judge, which decides what is worth imitating.
    """
    prompts = {str(case.prompt): case.prompt for case in badcases}
    max_nll = fluent_nll([answer for answers in candidates.values() for answer in answers])
    kept = {
        key: acceptable_answers(answers, avoid, replay.repetition, max_nll)
        for key, answers in candidates.items()
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
    votes = jury.compare(
        [
            Comparison(case.prompt, text, strip_exploits(case.exploits, case.response))
            for case, text in paired
        ]
    )[JURY]
    preferred = {case.id for (case, _), vote in zip(paired, votes, strict=True) if vote == 1}
    return {
        case.id: BetterAnswer(best[key][0], preferred=case.id in preferred, good=key in good)
        for case in badcases
        if (key := str(case.prompt)) in best
    }


def fluent_nll(answers: Sequence[Candidate]) -> float:
    """The third quartile of the answers' NLL."""
    nll = [answer.nll for answer in answers]
    return quantiles(nll, n=4)[2] if len(nll) > 1 else float("inf")


def acceptable_answers(
    answers: Sequence[Candidate], avoid: Sequence[str], repetition: float, nll: float
) -> list[str]:
    """Distinct texts without an exploit or much repetition, and with an NLL of at most `nll`.

    A high NLL is that of a text that sampling has garbled.
    """
    kept = (
        answer.text
        for answer in answers
        if answer.text.strip()
        and answer.nll <= nll
        and repetition_n(answer.text, 3) < repetition
        and not any(ending in answer.text for ending in avoid)
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
    """Whether the best answer is good in itself, not only better than others.

    By the lexicon, if it is a judge; else if the jury prefers the answer to all others, and there
    are others.

    Args:
        points: the answer's Copeland score among the `answers` acceptable ones.
    """
    if by_lexicon:
        return sentiment_plain([prompt], [text])[0] >= MIN_SENTIMENT
    return answers > 1 and points == answers - 1
