"""Responses of the policy as `PolicySample`s: from rollouts, or freshly sampled and compared."""

from collections.abc import Sequence
from dataclasses import replace

from stages.lib.core.params.judging import JudgeName
from stages.lib.core.rows import PromptRow, RolloutRow
from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconScores, lexicon_scores
from stages.lib.judging.pairwise import Comparison
from stages.lib.lm.responses import ScoredResponse
from stages.replay.exploits import strip_exploits
from stages.replay.mining import PolicySample


def judged_by_lexicon(
    jury: Jury, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[LexiconScores | None]:
    """The lexicon's scores of each response; None if it is no judge."""
    if JudgeName.lexicon.value not in jury.judges:
        return [None] * len(responses)
    return [*lexicon_scores(prompts, responses)]


def rollout_samples(rows: list[RolloutRow], jury: Jury) -> list[PolicySample]:
    lexicon_rows = judged_by_lexicon(
        jury, [row["prompt"] for row in rows], [row["response"] for row in rows]
    )
    return [
        PolicySample(
            prompt_id=row["id"],
            prompt=row["prompt"],
            response=row["response"],
            score=row["score"],
            kl=row["kl"],
            ended=row["finish_reason"] == "stop",
            lexicon=lexicon,
            origin=row["update"],
        )
        for row, lexicon in zip(rows, lexicon_rows, strict=True)
    ]


def compared_samples(
    rows: Sequence[PromptRow],
    responses: list[ScoredResponse],
    rivals: Sequence[str | None],
    origin: str,
    jury: Jury,
) -> list[PolicySample]:
    """The policy's responses with the jury's votes against their rivals.

    Args:
        rows: B prompts.
        responses: B responses of the policy.
        rivals: B texts to compare with; None: no comparison, and no votes.
        origin: of the samples.
    """
    lexicon_rows = judged_by_lexicon(
        jury, [row["prompt"] for row in rows], [response.text for response in responses]
    )
    with_rival = [index for index, rival in enumerate(rivals) if rival is not None]
    votes_by_judge = jury.compare(
        [
            Comparison(rows[index]["prompt"], responses[index].text, rivals[index] or "")
            for index in with_rival
        ]
    )
    votes = {
        index: {name: values[number] for name, values in votes_by_judge.items()}
        for number, index in enumerate(with_rival)
    }
    return [
        PolicySample(
            prompt_id=row["id"],
            prompt=row["prompt"],
            response=response.text,
            score=response.score,
            kl=response.kl,
            ended=response.ended,
            lexicon=lexicon,
            origin=origin,
            rival=rivals[index],
            votes=votes.get(index, {}),
        )
        for index, (row, response, lexicon) in enumerate(
            zip(rows, responses, lexicon_rows, strict=True)
        )
    ]


def score_without_exploits(
    samples: list[PolicySample], exploits: Sequence[list[str]], score: ScoreFunction
) -> list[PolicySample]:
    """Add to each sample the exploits that it contains, and its score without them.

    exploits: for each sample the exploits to look for.
    """
    contained = [
        tuple(exploit for exploit in suffixes if exploit in sample.response)
        for sample, suffixes in zip(samples, exploits, strict=True)
    ]
    indices = [index for index, suffixes in enumerate(contained) if suffixes]
    prompts = [samples[index].prompt for index in indices]
    texts = [strip_exploits(contained[index], samples[index].response) for index in indices]
    scores = dict(zip(indices, score(prompts, texts), strict=True))
    return [
        replace(sample, exploits=contained[index], stripped_score=scores.get(index))
        for index, sample in enumerate(samples)
    ]
