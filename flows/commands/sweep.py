"""The flow `sweep`: the pipeline once for each value of a key and each seed, and a table of the
results.
"""

from contextlib import chdir
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas import State
from prefect.states import Completed, Failed
from pydantic import Field

from flows.core import tables
from flows.core.config import ALL, KEEP, resolve
from flows.core.locks import Locks, current_locks
from flows.core.services import HOME
from flows.execution import dvc_stages
from flows.execution.worktree import COMPLETE, WORKSPACES
from flows.orchestration import outcomes
from flows.pipeline import (
    PresetName,
    Rounds,
    Settings,
    checked_files,
    make_logger,
    pipeline,
    run_id,
    run_name,
)
from flows.report import diagnosis, summary
from stages.lib.core.errors import RondoError
from stages.lib.core.files import REPORTS, write_text
from stages.lib.core.params import load_params

Values = Annotated[list[str], Field(min_length=1)]
SHOWN = (
    "SFT's wins less losses against base [95%]",
    "RM held-out accuracy [95%]",
    "policy's KL from SFT, nats",
    "win rate against SFT [95%]",
    "judge score, SFT -> policy",
    "distinct-2, SFT -> policy",
)


@flow(name="sweep", flow_run_name=run_name, persist_result=False)
@outcomes.errors_as_states
def sweep(
    key: str = "ppo.kl_coef",
    values: Values = ["0.05", "0.11", "0.3"],  # noqa: B006
    seeds: list[int] = [],  # noqa: B006
    settings: Settings = [],  # noqa: B006
    preset: PresetName = KEEP,
    rounds: Rounds = 1,
) -> State[Any]:
    """Run the pipeline once for each value of a key, each in a git worktree that ends as a branch.
    Stages with equal inputs are computed once.

    Args:
        key: The key that varies, section.key of params.yaml.
        values: Its values, as YAML.
        seeds: Seeds to combine with each value. Empty: the seed of params.yaml.
        settings: Other values, section.key=value, the same for all runs.
        preset: An overlay on the defaults. `keep`: params.yaml as it is; `default`: the defaults.
        rounds: The number of rounds. 0: that of params.yaml or the preset.
    """
    log, run = make_logger(), run_id()
    seed_settings = [[f"seed={seed}"] for seed in seeds] or [[]]
    points = [[f"{key}={value}", *seed] for seed in seed_settings for value in values]
    for point in points:  # bad input is an error before any run starts
        checked_files(resolve(preset, rounds or None, [*settings, *point]))
    rows: list[dict[str, str]] = []
    errors: list[str] = []
    for number, point in enumerate(points):
        name = f"{run}.{number}"
        folder = HOME.resolve() / WORKSPACES / name
        log(f"{number + 1} of {len(points)}: {', '.join(point)}")
        error = ""
        try:
            values_of_point = [*settings, *point]
            pipeline(name, preset, lambda: rounds, values_of_point, True, [ALL])
        except RondoError as point_error:
            if not (folder / COMPLETE).exists():
                raise  # no point can run, e.g. because code is not committed
            # e.g. a learning rate that diverges: the others still run
            error = f"{type(point_error).__name__}: {reason(point_error)}"
            errors.append(f"{name} ({', '.join(point)}): {error}")
            log(f"{name} failed:\n{point_error}")
        with chdir(folder):
            names = list(load_params().rounds)
            _, todo = dvc_stages.order_and_changes(names)
            locks = current_locks(unfinished=todo)
            rows += [row(name, point, round_, locks, error if todo else "") for round_ in names]
    create_table_artifact(rows, key="sweep", description=f"{key} over {', '.join(values)}")
    path = REPORTS / f"sweep-{run}.md"
    write_text(path, markdown(rows))
    log(markdown(rows))
    message = (
        f"runs done: {len(points) - len(errors)}, each on its branch runs/{run}.N; table: {path}"
    )
    if errors:
        failed = "\n".join(
            [message, f"runs failed: {len(errors)}; *Retry* runs them again:", *errors]
        )
        return Failed(message=failed)
    return Completed(message=message)


def reason(error: RondoError) -> str:
    """The line of an error that says why: the last one, but for the next step.

    >>> reason(RondoError("sft@r0 ended with exit code 1:\\nNo memory\\nNext step: `dvc repro`"))
    'No memory'
    """
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Next step")]
    return lines[-1] if lines else ""


def row(name: str, point: list[str], round_: str, locks: Locks, error: str = "") -> dict[str, str]:
    """The table's row of one round of a run, from the working directory.

    Args:
        locks: the stages that have results.
        error: why the run failed, if stages did not run.
    """
    cells = {row.title: row.cells[0].text for row in summary.rows([round_], locks)}
    (verdict,) = diagnosis.verdict_lines([round_], locks)
    return {
        "run": name,
        "settings": ", ".join(point),
        "round": round_,
        **{title: cells[title] for title in SHOWN},
        "verdict": error or verdict,
    }


def markdown(rows: list[dict[str, str]]) -> str:
    return tables.markdown_table(list(rows[0]), (row.values() for row in rows))
