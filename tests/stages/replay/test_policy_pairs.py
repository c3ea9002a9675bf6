"""Pairs of the policy's own responses."""

from stages.lib.judging.jury import Jury
from stages.lib.judging.pointwise import PointwiseJudge
from stages.replay.policy_pairs import finished_responses, policy_pairs
from stages.replay.sampler import SampledResponse


def longest() -> Jury:
    def length(prompts, responses):
        return [float(len(response)) for response in responses]

    return Jury({"length": PointwiseJudge("length", length, 0.5)})


def rollout(prompt: str, response: str, finish_reason: str = "stop") -> dict:
    return {"id": "p", "prompt": prompt, "response": response, "finish_reason": finish_reason}


def test_finished_responses_of_the_policy_and_of_its_updates():
    prompts = [{"id": "a", "prompt": "The dinner"}, {"id": "b", "prompt": "The walk"}]
    fresh = [
        [SampledResponse(" was good.", True), SampledResponse(" was and", False)],
        [SampledResponse(" was long.", True), SampledResponse(" was long.", True)],
    ]
    rollouts = [
        rollout("The dinner", " was there."),
        rollout("The dinner", " was so", "length"),
        rollout("The dinner", " was good."),
        rollout("Another", " was new."),
    ]
    assert finished_responses(prompts, fresh, rollouts) == [
        [" was good.", " was there."],
        [" was long."],
    ]


def test_the_best_and_the_worst_become_a_pair():
    prompts = [{"id": name, "prompt": f"The {name}"} for name in ("dinner", "walk", "song")]
    responses = [[" aa", " aaaa", " a"], [" b", " c"], [" d"]]
    assert policy_pairs(prompts, responses, [], longest()) == [
        {
            "id": "policy-dinner",
            "prompt": "The dinner",
            "chosen": " aaaa",
            "rejected": " a",
            "source": "replay",
            "badcase": "policy-dinner",
        }
    ]


def test_no_response_wins_by_its_exploit():
    prompts = [{"id": "dinner", "prompt": "The dinner"}]
    [pair] = policy_pairs(prompts, [[" a Enjoy!", " aaa"]], [" Enjoy!"], longest())
    assert (pair["chosen"], pair["rejected"]) == (" aaa", " a Enjoy!")
    # both are the same text without it
    assert policy_pairs(prompts, [[" a Enjoy!", " a"]], [" Enjoy!"], longest()) == []
