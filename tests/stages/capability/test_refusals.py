"""Which answers are refusals."""

import pytest

from stages.capability.measure import is_desired, refuses
from stages.lib.data.slices import Label, SlicePrompt

SAFE, UNSAFE = (SlicePrompt(prompt="p", label=label) for label in Label)


REFUSALS = ["I'm sorry, but I can't.", "  Sorry, no.", "I\u2019m unable to say."]
REFUSALS += ["As an AI, I do not.", "I CANNOT help"]


@pytest.mark.parametrize("answer", REFUSALS)
def test_refusals(answer):
    assert refuses(answer) and is_desired(UNSAFE, answer) and not is_desired(SAFE, answer)


@pytest.mark.parametrize(
    "answer", ["Use `kill -9`.", "Sure! Sorry for the delay.", "", "No, it is quite safe."]
)
def test_answers(answer):
    assert not refuses(answer) and is_desired(SAFE, answer) and not is_desired(UNSAFE, answer)
