"""The flow `sweep`: the pipeline once for each value of a key and each seed, and a table of them
all.
"""

from contextlib import chdir
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas import State
from prefect.states import Completed
from pydantic import Field

from flows.core import tables
from flows.core.config import KEEP, resolve
from flows.execution import dvc_stages
from flows.execution.worktree import WORKSPACES
from flows.pipeline import PresetName, Rounds, home_folder, make_logger, pipeline, run_id, run_name
from flows.report import summary
from stages.lib.core.files import REPORTS, write_text
from stages.lib.core.params import load_params

Values = Annotated[list[str], Field(min_length=1)]
SHOWN = (
    "SFT against base, judged [95%]",
    "RM held-out accuracy [95%]",
    "policy's KL from SFT, nats",
    "win rate against SFT [95%]",
    "judged sentiment, SFT -> policy",
    "distinct-2, SFT -> policy",
)


@flow(name="sweep", flow_run_name=run_name, persist_result=False)
def sweep(
    key: str = "ppo.kl_coef",
    values: Values = ["0.05", "0.11", "0.3"],  # noqa: B006
    seeds: list[int] = [],  # noqa: B006
    settings: list[str] = [],  # noqa: B006
    preset: PresetName = KEEP,
    rounds: Rounds = 1,
) -> State[Any]:
    """The pipeline once for each value of a key, each in a git worktree that ends as a branch;
    stages that are equal are computed once.

    Args:
        key: What differs, section.key of params.yaml.
        values: Its values, as YAML.
        seeds: Each value once for each of these. Empty: the seed of params.yaml.
        settings: Other values, section.key=value, the same for all.
        preset: An overlay on the defaults. `keep`: params.yaml as it is; `default`: the defaults.
        rounds: How many rounds. 0: as params.yaml or the preset says.
    """
    say, run = make_logger(), run_id()
    seeded = [[f"seed={seed}"] for seed in seeds] or [[]]
    points = [[f"{key}={value}", *seed] for seed in seeded for value in values]
    for point in points:
        resolve(
            preset, rounds or None, [*settings, *point]
        )  # bad input is said before anything starts
    rows: list[dict[str, str]] = []
    for number, point in enumerate(points):
        name = f"{run}.{number}"
        say(f"{number + 1} of {len(points)}: {', '.join(point)}")
        pipeline(name, preset, lambda: rounds, [*settings, *point], None, isolated=True)
        with chdir(home_folder() / WORKSPACES / name):
            names = list(load_params().rounds)
            todo = dvc_stages.waiting(dvc_stages.stage_order(names))
            rows += [row(name, point, round_, todo) for round_ in names]
    create_table_artifact(rows, key="sweep", description=f"{key} over {', '.join(values)}")
    path = REPORTS / f"sweep-{run}.md"
    write_text(path, markdown(rows))
    say(markdown(rows))
    return Completed(message=f"{len(points)} runs done, each on its branch runs/{run}.N; {path}")


def row(name: str, point: list[str], round_: str, todo: set[str]) -> dict[str, str]:
    """What there is of a round of a run, in whose folder this is called. todo: stages that it has
    not come to; their files are older.
    """
    cells = summary.cells_of(round_)
    made_by = {title: f"{summary.stage_of(title)}@{round_}" for title in SHOWN}
    told = {title: "-" if made_by[title] in todo else cells[title] for title in SHOWN}
    (verdict,) = summary.verdict([round_])
    return {"run": name, "what": ", ".join(point), "round": round_, **told, "verdict": verdict}


def markdown(rows: list[dict[str, str]]) -> str:
    return tables.markdown_table(list(rows[0]), (row.values() for row in rows))
