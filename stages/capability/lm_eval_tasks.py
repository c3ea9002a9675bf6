"""Tasks of EleutherAI's lm-evaluation-harness (the extra `lm-eval`): its own, and slices/*.yaml."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params.evaluation import CapabilityParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.progress import progress
from stages.lib.data.prompts import chat_template
from stages.lib.data.slices import SLICES


def run_tasks(
    model: Any, tokenizer: Any, params: CapabilityParams, prompt_format: PromptFormat
) -> dict[str, list[float]]:
    """Scores in 0..1 by task of capability.tasks, one per document.

    A group has the documents of all its tasks.

    Raises:
        BadInput: lm-eval is not installed, a task does not exist, or none of its metrics is in 0..1
            for each document.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise BadInput(
            "capability.tasks: lm-eval is not installed; "
            "run `.venv/bin/python -m pip install -e '.[lm-eval]'`"
        ) from None
    manager = TaskManager(include_path=str(SLICES))
    if unknown := [name for name in params.tasks if name not in manager.all_tasks]:
        raise BadInput(
            f"capability.tasks {', '.join(unknown)}: no such task; "
            "`lm-eval ls tasks --include_path slices` lists them"
        )
    if prompt_format is PromptFormat.chat:  # lm-eval renders the prompts itself
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = chat_template(tokenizer)
    with progress(f"tasks {', '.join(params.tasks)}"):
        results = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=params.batch_size),
            tasks=list(params.tasks),
            limit=params.limit,
            task_manager=manager,
            apply_chat_template=prompt_format is PromptFormat.chat,
            log_samples=True,
            bootstrap_iters=0,
        )
    scores = {
        task: document_scores(task, rows, results["higher_is_better"][task])
        for task, rows in results["samples"].items()
    }
    groups = results["group_subtasks"]
    return {
        name: [score for task in expand_group(name, groups) for score in scores[task]]
        for name in params.tasks
    }


def expand_group(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, and of the groups in it; for a task its own name."""
    members = groups.get(name, ())
    if not members:
        return [name]
    return [task for member in members for task in expand_group(member, groups)]


def document_scores(
    task: str, rows: Sequence[Mapping[str, Any]], higher_is_better: Mapping[str, bool]
) -> list[float]:
    """The first metric that is in 0..1 for each document and better if higher.

    If lm-eval applied several filters, the rows of the first one are used.

    Raises:
        BadInput: there is no such metric.
    """
    filtered = [row for row in rows if row["filter"] == rows[0]["filter"]]
    documents = sorted(filtered, key=lambda row: row["doc_id"])
    for metric in rows[0]["metrics"]:
        numbers = [row[metric] for row in documents]
        if higher_is_better.get(metric) and all(
            isinstance(number, int | float) and 0 <= number <= 1 for number in numbers
        ):
            return [float(number) for number in numbers]
    names = ", ".join(rows[0]["metrics"])
    raise BadInput(
        f"capability.tasks {task}: expected a metric that is in 0..1 for each document and better "
        f"if higher, found {names}; remove the task"
    )
