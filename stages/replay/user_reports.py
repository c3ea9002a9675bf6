"""What people add to replay: responses that they report, and prompts to sample."""

from collections.abc import Sequence

from stages.lib.core.rows import PromptRow
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import check_not_in_eval_set
from stages.replay.badcases import MiningPrompt, Report, read_user_rows


def read_user_reports(
    round_: str, evaluation: Sequence[PromptRow]
) -> tuple[list[Report], list[PromptRow]]:
    """Reports, and prompts to sample.

    Raises:
        BadInput: a row is neither, or its prompt is in the evaluation set or in slices/, which may
            not be trained on.
    """
    rows = read_user_rows(round_)
    prompts = [(f"{location}: its prompt", row.prompt) for location, row in rows]
    check_not_in_eval_set(prompts, evaluation, "remove the row")
    check_not_in_slices(prompts)
    reports = [row for _, row in rows if isinstance(row, Report)]
    mining = [row for _, row in rows if isinstance(row, MiningPrompt)]
    return reports, [{"id": row.id, "prompt": row.prompt} for row in mining]
