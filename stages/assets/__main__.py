"""The assets stage: get the base model and the raw data, once for all rounds.

Input: `assets` in params.yaml (a hub id, a local path, `embedded` or `tiny`).
Outputs: assets/model, assets/data, and assets/start, a placeholder for each output that the first
round would read from a previous round.
Run: `python -m stages.assets`.
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

# The outputs of a previous round that a stage depends on: DVC wants every dependency to exist.
PREDECESSOR_OUTPUTS = (
    *("prepare/data", "replay/data", "sft/model"),
    *("reward/model", "reward/judge", "reward/scores.jsonl"),
    *("ppo/policy", "ppo/rollouts", "champion/champion.json"),
    *(f"{stage}/metrics.json" for stage in ("evaluate", "capability", "replay", "ppo")),
)


def main(params: Params, round_: str) -> None:
    """Write all of assets/, which is the same for every round."""
    with build_folder(ASSETS / "start") as folder:
        for output in PREDECESSOR_OUTPUTS:
            write_text(folder / output / "EMPTY", "The first round has no predecessor.\n")
    with build_folder(ASSETS / "data") as folder:
        write_data(params, folder)
    with build_folder(ASSETS / "model") as folder:
        write_model(params, folder)


@contextmanager
def build_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that replaces `target` if the block succeeds and is deleted if it fails.

    So a failed download never leaves a half-written `target`.
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
