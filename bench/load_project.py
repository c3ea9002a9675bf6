"""The project that bench/load.py measures: `python -m bench.load_project FOLDER` makes it.

The first two rounds are real, of the tiny preset. The others are copies of the second, ended by the
project's own code; the last one has a million rollouts and 200 checkpoints. Its MLflow has 100 runs
of all stages. All is written by the project's own writers.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, cast

import yaml

from flows.core.config import write_params
from flows.core.locks import LOCK
from flows.core.services import HOME
from flows.execution import history
from flows.tracking.mlflow_store import MlflowStore, store_uri
from flows.tracking.provenance import PROJECT, project_id
from flows.tracking.records import Record, milliseconds, read_record
from stages.lib.core.files import (
    GATES,
    REPORTS,
    ROUNDS,
    read_json,
    read_jsonl,
    stage_dir,
    write_json,
    write_jsonl,
    write_text,
)
from stages.lib.core.params import load_params
from stages.lib.core.params.data import rounds
from stages.lib.core.rows import RolloutRow
from stages.lib.data.rollouts import RolloutLog, read_rollouts
from tests.clones import clone_of_working_tree

ROUND_COUNT, CHECKPOINTS, RUNS = 30, 200, 100
UPDATES, EPISODES, PROMPTS = 1000, 1000, 10_000  # a million rollouts
LAST = f"r{ROUND_COUNT - 1}"
WORDS = 24  # of a response, as in the default task
VOCABULARY = 5000


def make(folder: Path) -> None:
    clone_of_working_tree(folder)
    for command in (["run", "--preset", "tiny", "--rounds", "1"], ["next-round"]):
        subprocess.run([sys.executable, "-m", "flows.cli", *command], cwd=folder, check=True)
    with chdir(folder):
        add_rounds()
        fill_last_round()
        subprocess.run([sys.executable, "-m", "dvc", "commit", "-q", "-f"], check=True)
        add_runs()


def add_rounds() -> None:
    """Copies of r1 up to LAST; all rounds but LAST have ended."""
    params, entries = load_params(), history.read_entries(LOCK)
    for number in range(2, ROUND_COUNT):
        for folder in (ROUNDS, GATES, REPORTS):
            shutil.copytree(folder / "r1", folder / f"r{number}", dirs_exist_ok=True)
        Path(f"badcases/r{number}.jsonl").touch()
        entries |= {
            renamed(address, number): renamed(entry, number)
            for address, entry in entries.items()
            if address.endswith("@r1")
        }
    write_text(LOCK, yaml.safe_dump({"schema": "2.0", "stages": entries}, sort_keys=False))
    *ended, _ = rounds(ROUND_COUNT)
    params = params.model_copy(update={"rounds": rounds(ROUND_COUNT)})
    write_params(params)
    history.write(params, ended)


def renamed(value: Any, number: int) -> Any:
    """A part of dvc.lock about r1, as one about another round and its predecessor."""
    names = {"r0": f"r{number - 1}", "r1": f"r{number}"}
    text = re.sub(r"\br[01]\b", lambda match: names[match[0]], json.dumps(value))
    return json.loads(text)


def fill_last_round() -> None:
    """A million rollouts, 200 checkpoints, and metrics of 1000 updates."""
    ppo, evaluation = stage_dir(LAST, "ppo"), stage_dir(LAST, "evaluate")
    row = next(read_rollouts(ppo / "rollouts", "the tiny preset"))
    shutil.rmtree(ppo / "rollouts")
    log = RolloutLog(ppo / "rollouts")
    for update in range(1, UPDATES + 1):
        log.append(rollouts(row, update))
    updates = range(1, UPDATES + 1)
    [step, *_] = read_jsonl(ppo / "metrics.jsonl", "the tiny preset")
    write_jsonl(ppo / "metrics.jsonl", [step | {"step": update} for update in updates])
    repeat_first_line(ppo / "curves.csv", updates)

    [old, *_] = sorted((ppo / "checkpoints").glob("step_*"))
    metrics = read_json(evaluation / "metrics.json", "the tiny preset")
    values = metrics["checkpoints"][old.name]
    steps = range(UPDATES // CHECKPOINTS, UPDATES + 1, UPDATES // CHECKPOINTS)
    for number in steps:
        shutil.copytree(old, ppo / f"checkpoints/step_{number:05d}", dirs_exist_ok=True)
        metrics["checkpoints"][f"step_{number:05d}"] = values
    write_json(evaluation / "metrics.json", metrics)
    repeat_first_line(evaluation / "curves.csv", steps)


def repeat_first_line(path: Path, steps: Iterable[int]) -> None:
    """A CSV whose first line is that of each step."""
    header, line, *_ = path.read_text().splitlines()
    _, rest = line.split(",", 1)
    write_text(path, "\n".join([header, *(f"{step},{rest}" for step in steps), ""]))


def rollouts(row: RolloutRow, update: int) -> Iterator[RolloutRow]:
    """The episodes of an update, with texts of random words."""
    draw = random.Random(update)
    words = [f"word{number}" for number in range(VOCABULARY)]
    for episode in range(EPISODES):
        prompt = (update * EPISODES + episode) % PROMPTS
        response = " ".join(draw.choices(words, k=WORDS))
        changes: dict[str, Any] = {"id": f"prompt-{prompt}", "prompt": f"Prompt number {prompt}"}
        changes |= {"update": update, "response": response, "score": draw.gauss(0, 1)}
        yield cast(RolloutRow, {**row, **changes, "finish_reason": "stop"})


def add_runs() -> None:
    """Runs in MLflow, each with all stages of an ended round; the newest has LAST, with its
    checkpoints.
    """
    home, ended = HOME.resolve(), f"r{ROUND_COUNT - 2}"
    store, tags = MlflowStore(store_uri(home), True), {PROJECT: project_id(home)}
    records = [read_record("load", address, "ran", tags) for address in addresses_of(ended)]
    last = [read_record("load", address, "ran", tags) for address in addresses_of(LAST)]
    for number in range(RUNS):
        run, now = f"load-{number:03d}", milliseconds()
        store.send(Record(run=run, status="FINISHED", started=now, ended=now))
        for record in last if number == RUNS - 1 else records:
            store.send(record.model_copy(update={"run": run}))


def addresses_of(round_: str) -> list[str]:
    return [name for name in history.read_entries(LOCK) if name.endswith(f"@{round_}")]


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
