"""A verifiable reward: 1 if a response is exactly the answer in its row of the data, else 0.

rondo run --preset smoke \
    --set assets.data=files --set 'prepare.sources=[{path: examples/arithmetic.jsonl}]' \
    --set 'prepare.columns=[answer]' --set ppo.reward_weight=0 \
    --set 'ppo.rewards=[{name: exact, function: "examples.exact_answer:exact"}]'
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
