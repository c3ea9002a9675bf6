"""Preference pairs of the policy's own responses, ranked by the jury.

The reward model's first pairs are texts of people, and the policy writes other texts. So the jury
compares responses of the policy to one prompt, from several updates and fresh ones, and the next
round's reward model learns from the result.
No model is loaded here; the jury may ask its own.
"""

from collections.abc import Iterable, Mapping, Sequence

from stages.lib.core.rows import PreferencePair, PromptRow, RolloutRow
from stages.lib.data.splits import prompt_key
from stages.lib.judging.copeland import all_pairs, best_and_worst, copeland_scores
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.lm.responses import Response
from stages.lib.metrics.text import alike_in_length
from stages.replay.exploits import strip_exploits

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
