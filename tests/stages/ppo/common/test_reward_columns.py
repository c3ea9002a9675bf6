"""What reward functions and servers get: the row's columns, finish reasons and token counts."""

import pytest

from examples.exact_answer import exact
from stages.lib.core.errors import BadInput
from stages.lib.lm.responses import Response
from stages.ppo.common.rewards import (
    FailedReward,
    FunctionReward,
    RewardInputs,
    Rewards,
    RewardServer,
)
from tests.stages.ppo.servers import length_server

ROWS = [
    {"id": "a", "prompt": "1 + 1 =", "columns": {"answer": "2", "label": 0}},
    {"id": "b", "prompt": "1 + 2 =", "columns": {"answer": "3", "label": 1}},
    {"id": "replayed", "prompt": "1 + 3 ="},
]
TEXTS = [" 2", " 4", " 4"]
INPUTS = RewardInputs(
    ROWS,
    [
        Response([1], [5] * length, text, ended)
        for text, length, ended in zip(TEXTS, [2, 5, 3], [True, False, True], strict=True)
    ],
)
COLUMNS = {"answer": ["2", "3", None], "label": [0, 1, None]}
OTHERS = {"finish_reasons": ["stop", "length", "stop"], "token_counts": [2, 5, 3]}
PROMPTS = [row["prompt"] for row in ROWS]


def arguments_of(make):
    """The arguments with which a function that `make` returns is called."""
    calls = []

    def record(**arguments):
        calls.append(arguments)
        return [0.0] * 3

    assert FunctionReward(make(record), "key")(INPUTS) == [0.0] * 3
    return calls[0]


def test_a_function_of_prompts_and_texts_gets_no_more():
    assert arguments_of(lambda record: lambda p, r: record(p=p, r=r)) == {"p": PROMPTS, "r": TEXTS}


def test_further_parameters_get_what_they_name():
    arguments = arguments_of(
        lambda record: (
            lambda prompts, responses, token_counts, answer, other="default": record(
                prompts=prompts, responses=responses, n=token_counts, a=answer, other=other
            )
        )
    )
    assert arguments == {
        "prompts": PROMPTS,
        "responses": TEXTS,
        "n": [2, 5, 3],
        "a": COLUMNS["answer"],
        "other": "default",
    }


def test_any_further_parameters_get_all_columns():
    arguments = arguments_of(lambda record: lambda p, r, answer, **columns: record(**columns))
    assert arguments == {"label": COLUMNS["label"], **OTHERS}


def test_a_column_with_the_name_of_the_first_parameter_is_not_given_twice():
    row = {"id": "a", "prompt": "1", "columns": {"responses": "x", "answer": "2"}}
    inputs = RewardInputs([row], [Response([1], [2], "2", ended=True)])

    def reward(prompts, responses, **columns):
        return [float(responses == ["2"] and columns["answer"] == ["2"])]

    assert FunctionReward(reward, "key")(inputs) == [1.0]


@pytest.mark.parametrize("first", ["completions", "prompts"])
def test_trls_functions_are_called_by_keyword(first):
    def only_completions(record):
        return lambda completions, answer, **_: record(c=completions, a=answer)

    def swapped(record):
        return lambda completions, prompts, answer: record(c=completions, a=answer, p=prompts)

    expected = {"c": TEXTS, "a": COLUMNS["answer"]}
    if first == "completions":
        assert arguments_of(only_completions) == expected
    else:
        assert arguments_of(swapped) == expected | {"p": PROMPTS}


def test_a_column_that_no_row_of_a_batch_has_is_none():
    inputs = INPUTS.select([2])

    def reward(prompts, responses, answer):
        return [None if expected is None else 1.0 for expected in answer]

    assert FunctionReward(reward, "key")(inputs) == [
        FailedReward("returned None, not a finite number")
    ]


def test_a_column_that_no_prompt_has_is_an_error_at_the_start():
    def reward(prompts, responses, answer, solution, token_counts, other=None, **columns):
        return [0.0] * len(responses)

    rewards = Rewards({"mine": FunctionReward(reward, "ppo.rewards mine")}, {"mine": 1.0})
    with pytest.raises(
        BadInput, match=r"ppo\.rewards mine: its function requires solution, .* prepare\.columns"
    ):
        rewards.check_columns(ROWS)
    rewards.check_columns([*ROWS, {"id": "c", "prompt": "1", "columns": {"solution": None}}])


def test_a_server_gets_the_columns_too():
    with length_server() as server:
        RewardServer("far", server.url, str)(INPUTS)
    assert server.requests == [
        {
            "query": [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)],
            "prompts": PROMPTS,
            "labels": COLUMNS["label"],
            "ids": ["a#0", "b#1", "replayed#2"],
            "columns": COLUMNS,
            **OTHERS,
        }
    ]


def test_the_example_of_exact_answers():
    """Correct; wrong; correct so far, but cut off; of a prompt without an answer."""
    texts, answers = [" 23", " 24", "23", " 23"], ["23", "23", "23", None]
    reasons = ["stop", "stop", "length", "stop"]
    assert exact([], texts, answers, reasons) == [1.0, 0.0, 0.0, None]
