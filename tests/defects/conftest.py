"""The pipeline from the data to the reward model's gate, on a small world: all of it once, and from
where a defect is planted.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.execution import fork_server
from stages.annotate import __main__ as annotate
from stages.assets import __main__ as assets
from stages.assets import inputs
from stages.battery import __main__ as battery
from stages.gate.verdict import run_gate
from stages.lib.core.errors import RondoError
from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params, check_params
from stages.prepare import __main__ as prepare
from stages.reward import __main__ as reward
from stages.sft import __main__ as sft
from tests.defects.world import World, world

STEPS: dict[str, Callable[[Params, str], None]] = {
    "assets": assets.main,
    "prepare": prepare.main,
    "sft": sft.main,
    "gate_sft": lambda params, round_: run_gate(params, "sft", round_),
    "annotate": annotate.main,
    "reward": reward.main,
    "battery": battery.main,
    "gate_reward": lambda params, round_: run_gate(params, "reward", round_),
}
SETTINGS: dict[str, Any] = {
    "assets": {"model": "tiny", "data": "files"},
    "prepare": {"max_eval_prompts": 40, "max_prompt_tokens": 31},
    "model": {"dtype": "float32", "threads": 1},
    "sft": {
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 8,
        "max_length": 64,
        "lora": {"r": 0},
    },
    "reward": {
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 8,
        "max_length": 64,
        "lora": {"r": 0},
    },
    "ppo": {"response_length": 16},
    # a model that was never pretrained knows no misspelt word and no quotation marks
    "battery": {"edits": ["lower_case"]},
}


@dataclass(frozen=True)
class Stop:
    """Where the pipeline stopped, and its message; `failed`: a gate's metrics that were out of
    their bands.
    """

    step: str
    message: str
    failed: tuple[str, ...] = ()


def settings(sources: World, changes: dict[str, Any]) -> Params:
    listed = [{"path": name, "use": name.split("_")[0]} for name in sources]
    values = {section: dict(keys) for section, keys in SETTINGS.items()}
    values["prepare"]["sources"] = listed
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return check_params(values, "test")


# of prepare's files those that SFT and its gate read
SFT_DATA = [
    stage_dir("r0", "prepare") / "data" / f"{name}.jsonl"
    for name in ("sft_train", "sft_eval", "eval_prompts")
]


def go(params: Params, start: str, trained: Path | None = None) -> Stop | None:
    """The steps from `start` on, here; None if nothing stops them.

    trained: a world that passed SFT's gate with these settings. SFT's outputs here are a copy of
    its outputs, and are kept if its data are the same.
    """
    Path("params.yaml").write_text(
        yaml.safe_dump(params.model_dump(mode="json"))
    )  # for the process that reloads the reward model
    inputs.main(params, "r0")
    names = list(STEPS)
    for step in names[names.index(start) :]:
        if trained and step in ("sft", "gate_sft") and same_files(SFT_DATA, trained):
            continue
        try:
            STEPS[step](params, "r0")
        except RondoError as error:
            verdict = Path("reports/r0") / f"{step}.json"
            checks = json.loads(verdict.read_text())["checks"] if step.startswith("gate_") else []
            return Stop(
                step, str(error), tuple(check["metric"] for check in checks if not check["passed"])
            )
    return None


def same_files(paths: list[Path], folder: Path) -> bool:
    """Whether these files, here, are byte for byte those of the other folder."""
    return all(path.read_bytes() == (folder / path).read_bytes() for path in paths)


def write(sources: World) -> None:
    for name, rows in sources.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def clean(built_once: Callable[..., Path], forking_python: str) -> tuple[Path, Stop | None]:
    """A folder in which the pipeline ran on the world as it is, and where it stopped."""

    def build(folder: Path) -> None:
        sources = world()
        (folder / "world").mkdir()
        with chdir(folder / "world"), pytest.MonkeyPatch.context() as environment:
            environment.setenv(fork_server.VARIABLE, forking_python)
            write(sources)
            stop = go(settings(sources, {}), "assets")
        (folder / "stop").write_bytes(pickle.dumps(stop))

    folder = built_once("clean", build)
    return folder / "world", pickle.loads((folder / "stop").read_bytes())


@pytest.fixture
def planted(
    clean: tuple[Path, Stop | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast_processes: None,
) -> Callable[..., Stop | None]:
    """Run from `start` on in a copy of that folder, with other settings or sources (from `assets`
    on, which records them).
    """
    folder = tmp_path / "world"
    shutil.copytree(clean[0], folder)
    monkeypatch.chdir(folder)

    # the copy is there from the beginning, so that a test can plant something in its files
    def run(start: str, sources: World | None = None, **changes: Any) -> Stop | None:
        everything = world() | (sources or {})
        write(sources or {})
        pairs_alone = start == "assets" and changes.keys() <= {"reward"} and clean[1] is None
        return go(settings(everything, changes), start, clean[0] if pairs_alone else None)

    return run
