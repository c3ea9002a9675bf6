"""Badcases that people report: kept in badcases/, if no evaluation would be trained on."""

from collections.abc import Sequence

from filelock import FileLock

from flows.core.services import HOME
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import PromptRow, read_rows
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import check_not_in_eval_set
from stages.replay.badcases import UserInput, add_user_rows, report_path


def keep(reports: Sequence[tuple[str, UserInput]], round_: str | None) -> str:
    """Add reports and prompts to a round's file in badcases/.

    Args:
        reports: each with the words for its prompt in an error message.
        round_: None: the last round of params.yaml.

    Returns:
        What was added, and the next step.

    Raises:
        BadInput: there is no such round, or a prompt is one of the evaluation, on which no round
            may train.
    """
    params = load_params()
    name = round_ or list(params.rounds)[-1]
    params.check_round(name)
    prompts = [(label, report.prompt) for label, report in reports]
    for known_round in params.rounds:
        path = stage_dir(known_round, "prepare") / "data/eval_prompts.jsonl"
        if path.exists():
            check_not_in_eval_set(
                prompts,
                read_rows(PromptRow, path),
                "nothing was kept. Report the policy's response to another prompt",
            )
    check_not_in_slices(prompts)
    HOME.mkdir(exist_ok=True)
    with FileLock(HOME / "badcases.lock"):  # who writes at the same time would lose rows
        added = add_user_rows(name, [report for _, report in reports])
    return (
        f"{report_path(name)}: {added} added, {len(reports) - added} known already. "
        f"Commit it; `rondo run` retests and replays them in {name}"
    )
