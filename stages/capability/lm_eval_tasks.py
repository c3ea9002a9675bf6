"""Tasks of EleutherAI's lm-evaluation-harness (the extra `lm-eval`): those that it knows, and those
of slices/*.yaml.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params.evaluation import CapabilityParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.slices import SLICES


def run_tasks(
    model: Any, tokenizer: Any, params: CapabilityParams, prompt_format: PromptFormat
) -> dict[str, list[float]]:
    """For each of capability.tasks a number in 0..1 of every document; of a group, of all documents
    of its tasks.

    Raises:
        BadInput: lm-eval is not installed, or there is no such task, or none of its metrics is a
            share.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise BadInput(
            "capability.tasks: lm-eval is not installed; run `.venv/bin/python -m pip install -e '.[lm-eval]'`"
        ) from None
    manager = TaskManager(include_path=str(SLICES))
    if unknown := [name for name in params.tasks if name not in manager.all_tasks]:
        raise BadInput(
            f"capability.tasks {', '.join(unknown)}: no such task; `lm-eval ls tasks --include_path slices` lists them"
        )
    told = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=params.batch_size),
        tasks=list(params.tasks),
        limit=params.limit,
        task_manager=manager,
        apply_chat_template=prompt_format is PromptFormat.chat,
        log_samples=True,
        bootstrap_iters=0,
    )
    shares = {
        task: share(task, rows, told["higher_is_better"][task])
        for task, rows in told["samples"].items()
    }
    return {
        name: [value for task in tasks_of(name, told["group_subtasks"]) for value in shares[task]]
        for name in params.tasks
    }


def tasks_of(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, and of the groups in it; a task's own name."""
    within = groups.get(name, ())
    return [task for each in within for task in tasks_of(each, groups)] if within else [name]


def share(
    task: str, rows: Sequence[Mapping[str, Any]], higher_is_better: Mapping[str, bool]
) -> list[float]:
    """The first metric that is a number in 0..1 of every document, the more the better; of several
    filters the first.

    Raises:
        BadInput: none is.
    """
    first = sorted(
        (row for row in rows if row["filter"] == rows[0]["filter"]), key=lambda row: row["doc_id"]
    )
    for metric in rows[0]["metrics"]:
        numbers = [row[metric] for row in first]
        if higher_is_better.get(metric) and all(
            isinstance(number, int | float) and 0 <= number <= 1 for number in numbers
        ):
            return [float(number) for number in numbers]
    found = ", ".join(rows[0]["metrics"])
    raise BadInput(
        f"capability.tasks {task}: expected a metric in 0..1 of each document, the more the better, found {found}; leave it out"
    )
