"""A verifiable reward in place of a reward model: 1 if a response is exactly the answer in its row
of the data, else 0. And a judge that solves the sum itself.

rondo run --preset smoke \
    --set assets.data=files --set 'prepare.sources=[{path: examples/arithmetic.jsonl}]' \
    --set 'prepare.columns=[answer]' --set ppo.reward_weight=0 --set ppo.critic=policy \
    --set 'ppo.rewards=[{name: exact, function: "examples.exact_answer:exact"}]' \
    --set 'evaluate.judges=["examples.exact_answer:solves", fluency]'
"""

from collections.abc import Sequence


def exact(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[str | None],
    finish_reasons: Sequence[str],
    **_: object,
) -> list[float | None]:
    """One reward per response; None without an answer, e.g. of a prompt that people
    reported.

    A response that was cut off (`finish_reasons`) is not correct: the next token could change it.
    """
    rows = zip(completions, answer, finish_reasons, strict=True)
    return [
        None if expected is None else float(reason == "stop" and text.strip() == expected)
        for text, expected, reason in rows
    ]


def solves(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A judge that adds the two numbers itself: the nearer response is better.

    Returns:
        minus the distance from the sum, at most 100, which is also that of a text without number.
    """
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        first, second = prompt.removesuffix(" =").split(" + ")
        digits = response.strip()
        number = int(digits) if digits.isdecimal() and len(digits) < 9 else 10**9
        scores.append(-float(min(abs(number - int(first) - int(second)), 100)))
    return scores
