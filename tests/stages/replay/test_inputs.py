"""Which rollouts replay keeps of a long run."""

import random

from stages.lib.lm.responses import Response
from stages.replay.inputs import last_third, needed_rollouts
from stages.replay.training_rows import finished_responses


def rollout(number: int, prompt: str, update: int, finish_reason: str = "stop") -> dict:
    row = {"id": str(number), "prompt": prompt, "response": f" {number}"}
    return row | {"update": update, "finish_reason": finish_reason}


def test_the_last_third_and_the_last_that_ended_of_each_prompt_are_kept():
    rows = [
        rollout(0, "a", 0),  # SFT's
        rollout(1, "a", 1),
        rollout(2, "a", 2),
        rollout(3, "b", 3),
        rollout(4, "A ", 3),  # the same prompt
        rollout(5, "a", 3, "length"),
        rollout(6, "c", 9, "length"),
        rollout(7, "c", 6),
    ]
    kept, prompts = needed_rollouts(iter(rows), 2)
    assert kept == [rows[2], rows[3], rows[4], rows[6], rows[7]]
    assert prompts == [rows[0], rows[3], rows[6]]
    assert needed_rollouts([], 2) == ([], [])
    assert last_third(rows) == [rows[6]] and last_third([]) == []


def test_replay_makes_the_same_of_them_as_of_all():
    draw = random.Random(0)
    names = ["a", "b", "c", "d"]
    rows = [
        rollout(number, draw.choice(names), number // 20, draw.choice(["stop", "length"]))
        for number in range(400)
    ]
    kept, prompts = needed_rollouts(iter(rows), 3)
    assert len(kept) < len(rows) / 2
    assert last_third(kept) == last_third(rows)
    prompt_rows = [{"id": name, "prompt": name} for name in names]
    fresh = [[Response([], [], " new", True)] * 3 for _ in names]
    expected = finished_responses(prompt_rows, fresh, rows)
    assert finished_responses(prompt_rows, fresh, kept) == expected
    assert {row["prompt"] for row in prompts} == {*names}
