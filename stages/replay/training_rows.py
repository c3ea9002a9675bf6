"""The next round's training rows: pairs, demonstrations and prompts against badcases, and pairs of
the policy's own responses that the jury ranked.

No model is loaded here; the jury may ask its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.core.rows import (
    Demonstration,
    PreferencePair,
    PromptRow,
    RevisedResponse,
    RolloutRow,
    TrainingPrompt,
)
from stages.lib.core.types import Prompt
from stages.lib.data.splits import DataSets, prompt_key
from stages.lib.dedup.contamination import leaks_by_set
from stages.lib.judging.jury import Jury, all_pairs, best_and_worst, copeland_scores
from stages.lib.judging.lexicon import sentiment_plain
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.lm.responses import Response
from stages.lib.metrics.text import alike_in_length, repetition_n
from stages.replay.badcases import Badcase, Cause, State
from stages.replay.exploits import strip_exploits
from stages.replay.sampler import Candidate, CandidatesByPrompt

REVISED_SOURCE = "revision"  # `source` of demonstrations that a language model revised


@dataclass(frozen=True)
class BetterAnswer:
    """The jury's best answer to a badcase's prompt.

    preferred: whether it also beats the bad response, and the cause gives pairs. good: whether it
    is worth imitating.
    """

    text: str
    preferred: bool
    good: bool


def make_training_rows(
    badcases: Sequence[Badcase], best: Mapping[str, BetterAnswer]
) -> tuple[list[Badcase], list[PreferencePair], list[Demonstration], list[TrainingPrompt]]:
    """Make rows that train against the badcases.

    A pair is made if the jury prefers the better answer to the bad response without its exploits;
    if a person gave the better answer, always. A demonstration is made if the better answer is good
    in itself. The prompt is sampled by PPO again in any case.

    Args:
        best: by badcase id.

    Returns:
        (the badcases as replayed, with their better answers; pairs; demonstrations; prompts)
    """
    replayed: list[Badcase] = []
    pairs: list[PreferencePair] = []
    demonstrations: dict[tuple[str, str], Demonstration] = {}
    prompts: dict[str, TrainingPrompt] = {}
    for case in badcases:
        key = str(case.prompt)
        row: TrainingPrompt = {
            "id": f"replay-{case.id}",
            "prompt": case.prompt,
            "source": "replay",
            "badcase": case.id,
        }
        prompts.setdefault(key, row)
        answer = best.get(case.id)
        better = case.better or (answer.text if answer and answer.preferred else None)
        demonstrated = case.better or (answer.text if answer and answer.good else None)
        if better:
            pairs.append(
                {
                    "id": row["id"],
                    "prompt": case.prompt,
                    "source": "replay",
                    "badcase": case.id,
                    "chosen": better,
                    "rejected": case.response,
                }
            )
        if demonstrated:
            demonstrations.setdefault((key, demonstrated), {**row, "completion": demonstrated})
        replayed.append(case.model_copy(update={"better": better, "state": State.replayed}))
    return replayed, pairs, list(demonstrations.values()), list(prompts.values())


def demonstrations_of(revised: Sequence[RevisedResponse], round_: str) -> list[Demonstration]:
    """The revised responses of a round as demonstrations.

    `badcase` marks them as made by the pipeline, so that they never count as rows of people.
    """
    return [
        {
            "id": f"revised-{round_}-{row['id']}",
            "prompt": row["prompt"],
            "source": REVISED_SOURCE,
            "badcase": f"revised-{round_}-{row['id']}",
            "completion": row["revision"],
        }
        for row in revised
    ]


def add_earlier(made: DataSets, earlier: DataSets) -> DataSets:
    """The new rows, then those that replay made in earlier rounds, each text once.

    So the next round trains on the rows of all rounds (Wolf et al. 2025, arXiv 2505.18126), and a
    prompt that fails in each round does not become more and more frequent.
    """
    merged: dict[str, Sequence[PromptRow]] = {}
    for name, rows in made.items():
        by_texts: dict[tuple[object, ...], PromptRow] = {}
        for row in [*rows, *earlier[name]]:
            texts = (row.get(key) for key in ("completion", "chosen", "rejected"))
            by_texts.setdefault((prompt_key(row["prompt"]), *texts), row)
        merged[name] = [*by_texts.values()]
    return merged


def limit_rows(
    made: DataSets, evaluation: DataSets, human: Mapping[str, int], params: Params
) -> tuple[DataSets, int]:
    """The rows without leaks, each replay.weight times, at most replay.max_share of the training
    rows: if there is no room for all, the first ones.

    human: the number of rows from the data, by the names of `made`. Returns also the number of
    leaks.
    """
    config = params.replay
    kept, leaked = drop_leaks(made, evaluation, params.prepare.near_duplicate)
    limited: DataSets = {
        name: cap_share(
            [row for row in rows for _ in range(config.weight)], human[name], config.max_share
        )
        for name, rows in kept.items()
    }
    return limited, leaked


def drop_leaks(made: DataSets, evaluation: DataSets, similarity: float) -> tuple[DataSets, int]:
    """Rows that share no text with the evaluation set, and the number of dropped rows.

    The next round's prepare would refuse rows that leak.
    """
    held_out = [row for rows in evaluation.values() for row in rows]
    leaking = {
        name: {leak.row for leak in leaks}
        for name, leaks in leaks_by_set(made, held_out, similarity).items()
    }
    kept: DataSets = {
        name: [row for index, row in enumerate(rows) if index not in leaking[name]]
        for name, rows in made.items()
    }
    return kept, sum(map(len, leaking.values()))


def cap_share(rows: list[PromptRow], human: int, share: float) -> list[PromptRow]:
    """The first rows, at most so many that they are `share` of all, with `human` other rows."""
    return rows if share >= 1 else rows[: int(human * share / (1 - share))]


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


POLICY_PAIR = "policy-"  # begins the ids of these pairs


def finished_responses(
    prompts: Sequence[PromptRow],
    fresh: Sequence[Sequence[Response]],
    rollouts: Iterable[RolloutRow],
) -> list[list[str]]:
    """For each prompt the distinct texts that ended: the fresh ones, then those of PPO's updates.

    Of these at most as many as fresh ones were sampled, the last ones, since the number of
    comparisons grows with the square of the number of texts.

    Args:
        prompts: P prompts.
        fresh: new responses to each prompt.
        rollouts: in the order of the updates; update 0 is SFT (DPO and best-of-n have it).
    """
    by_prompt: Mapping[str, list[str]] = {prompt_key(row["prompt"]): [] for row in prompts}
    for rollout in rollouts:
        key = prompt_key(rollout["prompt"])
        if rollout["update"] and rollout["finish_reason"] == "stop" and key in by_prompt:
            by_prompt[key].append(rollout["response"])
    texts = []
    for row, responses in zip(prompts, fresh, strict=True):
        ended = [response.text for response in responses if response.ended]
        ended += by_prompt[prompt_key(row["prompt"])][-len(responses) :]
        texts.append(list(dict.fromkeys(ended)))
    return texts


def policy_pairs(
    prompts: Sequence[PromptRow],
    responses: Sequence[Sequence[str]],
    exploits: Sequence[str],
    jury: Jury,
    round_: str,
) -> list[PreferencePair]:
    """A pair per prompt: the two responses of about equal length that the jury ranks the furthest
    apart; none if the jury is undecided.

    The jury sees the responses without exploits, so that none wins by its exploit.

    Args:
        responses: of each prompt, distinct.
        round_: of the policy; a part of the ids, since a later round may have the same prompts.
    """
    # Of about the same length only. Else judges that like long texts, as VADER's sum over words
    # does, would teach length: four of five chosen responses were the longer ones (docs/log.md).
    compared = [
        [(i, j) for i, j in all_pairs(len(texts)) if alike_in_length(texts[i], texts[j])]
        for texts in responses
    ]
    comparisons = [
        Comparison(
            row["prompt"], strip_exploits(exploits, texts[i]), strip_exploits(exploits, texts[j])
        )
        for row, texts, indices in zip(prompts, responses, compared, strict=True)
        for i, j in indices
    ]
    outcomes = iter(jury.compare(comparisons)[JURY])
    pairs: list[PreferencePair] = []
    for row, texts, indices in zip(prompts, responses, compared, strict=True):
        votes = {pair: next(outcomes) for pair in indices}
        extremes = best_and_worst(copeland_scores(len(texts), votes), votes)
        if extremes:
            best, worst = extremes
            pair_id = f"{POLICY_PAIR}{round_}-{row['id']}"
            pairs.append(
                {
                    "id": pair_id,
                    "prompt": row["prompt"],
                    "chosen": texts[best],
                    "rejected": texts[worst],
                    "source": "replay",
                    "badcase": pair_id,
                }
            )
    return pairs
