"""Pairs of the policy's own responses."""

from stages.lib.judging.jury import Jury
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.lm.responses import Response
from stages.replay.training_rows import finished_responses, policy_pairs


def loudest() -> Jury:
    """The jury prefers the response with more exclamation marks."""

    def marks(prompts, responses):
        return [float(response.count("!")) for response in responses]

    return Jury({"marks": PointwiseJudge("marks", marks, 0.5)})


def rollout(prompt: str, response: str, finish_reason: str = "stop", update: int = 1) -> dict:
    row = {"id": "p", "prompt": prompt, "response": response, "finish_reason": finish_reason}
    return row | {"update": update}


def test_finished_responses_of_the_policy_and_of_its_updates():
    prompts = [{"id": "a", "prompt": "The dinner"}, {"id": "b", "prompt": "The walk"}]
    fresh = [
        [Response([], [], " was good.", True), Response([], [], " was and", False)],
        [Response([], [], " was long.", True), Response([], [], " was long.", True)],
    ]
    rollouts = [
        rollout("The walk", " was SFT's.", update=0),
        rollout("The dinner", " was the first of three, which are more than two."),
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
    responses = [[" aa!aa", " aa!!!", " aaaaa"], [" b", " c"], [" d"]]
    assert policy_pairs(prompts, responses, [], loudest(), "r3") == [
        {
            "id": "policy-r3-dinner",
            "prompt": "The dinner",
            "chosen": " aa!!!",
            "rejected": " aaaaa",
            "source": "replay",
            "badcase": "policy-r3-dinner",
        }
    ]


def test_no_response_wins_by_its_exploit():
    prompts = [{"id": "dinner", "prompt": "The dinner"}]
    texts = [" was Enjoy!!", " was good!!"]
    for order in (texts, texts[::-1]):
        [pair] = policy_pairs(prompts, [order], [" Enjoy!!"], loudest(), "r0")
        assert (pair["chosen"], pair["rejected"]) == (" was good!!", " was Enjoy!!")
    # both are the same to the jury without it
    texts = [" was Enjoy!!", " was good.."]
    assert policy_pairs(prompts, [texts], [" Enjoy!!"], loudest(), "r0") == []


def test_responses_of_unlike_length_are_not_compared():
    """The third wins most, but has only 6 of 8 characters of the first. So the second beats the
    first, the third the second, and these two have a point each.
    """
    prompts = [{"id": "dinner", "prompt": "The dinner"}]
    jury = loudest()
    [pair] = policy_pairs(prompts, [[" aaaaaaa", " aaaaa!", " !!!!!"]], [], jury, "r0")
    assert (pair["chosen"], pair["rejected"]) == (" aaaaa!", " aaaaaaa")
    assert len(jury.verdicts["marks"]) == 2
