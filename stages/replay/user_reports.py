"""What people give to replay: responses that they report, and prompts to ask beside the training
prompts.
"""

from collections.abc import Sequence

from stages.lib.core.types import Row
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import check_not_in_eval_set
from stages.replay.badcases import MiningPrompt, Report, read_user_rows


def read_user_reports(round_: str, evaluation: Sequence[Row]) -> tuple[list[Report], list[Row]]:
    """Reports; prompts to ask, as rows of `id` and `prompt`.

    Raises:
        BadInput: a row is neither, or its prompt is one of those that nobody may train on.
    """
    told = read_user_rows(round_)
    asked = [(f"{place}: its prompt", each.prompt) for place, each in told]
    check_not_in_eval_set(asked, evaluation, "remove the row")
    check_not_in_slices(asked)
    reports = [each for _, each in told if isinstance(each, Report)]
    return reports, [
        {"id": each.id, "prompt": each.prompt} for _, each in told if isinstance(each, MiningPrompt)
    ]
