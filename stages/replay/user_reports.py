"""What people give to replay: responses that they report, and prompts to ask beside the training
prompts.
"""

from collections.abc import Sequence

from stages.lib.core.types import Row
from stages.lib.data.slices import refuse_slices
from stages.lib.data.splits import refuse_frozen
from stages.replay.badcases import MiningPrompt, Report, read_given


def from_people(round_: str, evaluation: Sequence[Row]) -> tuple[list[Report], list[Row]]:
    """Reports; prompts to ask, as rows of `id` and `prompt`.

    Raises:
        BadInput: a row is neither, or its prompt is one of those that nobody may train on.
    """
    told = read_given(round_)
    asked = [(f"{place}: its prompt", each.prompt) for place, each in told]
    refuse_frozen(asked, evaluation, "remove the row")
    refuse_slices(asked)
    reports = [each for _, each in told if isinstance(each, Report)]
    return reports, [
        {"id": each.id, "prompt": each.prompt} for _, each in told if isinstance(each, MiningPrompt)
    ]
