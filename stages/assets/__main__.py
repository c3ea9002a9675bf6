"""Builds each part of assets/ in a temporary folder and renames it, so that nothing half-written
stays.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.assets.base_model import write_model
from stages.assets.datasets import write_data
from stages.lib.core.files import ASSETS, write_text
from stages.lib.core.params import Params
from stages.lib.core.stage import stage_main

PREDECESSOR = (
    *(
        "prepare/data",
        "replay/data",
        "sft/model",
        "reward/model",
        "reward/judge",
        "reward/scores.jsonl",
    ),
    *("ppo/policy", "ppo/rollouts", "champion/champion.json"),
    *(f"{stage}/metrics.json" for stage in ("evaluate", "capability", "replay", "ppo")),
)


def main(params: Params, round_: str) -> None:
    """The stage. It is the same for all rounds."""
    with whole_folder(ASSETS / "start") as folder:
        for part in PREDECESSOR:
            write_text(folder / part / "EMPTY", "The first round has no predecessor.\n")
    with whole_folder(ASSETS / "data") as folder:
        write_data(params, folder)
    with whole_folder(ASSETS / "model") as folder:
        write_model(params, folder)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that takes `target`'s place when the block ends well, and goes away
    otherwise.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    stage_main("assets", main)
