"""What killed processes leave: states to resume from, files and folders that are not finished."""

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.core.addresses import split_address
from stages.lib.core.files import RESUME_STATE, remove_unfinished, stage_dir, work_dir

DVC_TEMPORARY = re.compile(r"\.[\w-]{22}\.tmp")
WRITING_SECONDS = 1.0  # enough for a DVC that has made a folder to write the file in it


def clear_resume_states(address: str) -> None:
    """Delete the states from which a killed stage resumes, after DVC has recorded its outputs.

    The stage cannot do this itself: if DVC fails to record the outputs, the stage must resume.
    """
    stage, round_ = split_address(address)
    for state in work_dir(round_, stage).glob(f"*/{RESUME_STATE}"):
        remove_state(state)


def remove_state(state: Path) -> None:
    """Delete a resume state with the rollouts and checkpoints beside it.

    It goes first: a stage would resume from it without the rest if this process is killed here.
    """
    state.unlink()
    shutil.rmtree(state.parent)


def remove_temporaries(repo: Any, address: str) -> None:
    """Delete what a killed process of this stage, or of DVC, had not finished writing: files under
    the names that `replacing` and DVC give them until they are complete.

    Also of an unchanged stage, since `dvc repro` by hand removes none. Other commands write beside
    outputs, e.g. into reports/: their files stay.

    Args:
        repo: the opened repository of the working directory.
        address: DVC's name of the stage.
    """
    stage, round_ = split_address(address)
    for folder in (stage_dir(round_, stage), work_dir(round_, stage)):
        for path in folder.rglob(".*.tmp"):
            if path.is_file():
                path.unlink()
    (made,) = repo.stage.collect(address)
    for output in (Path(out.fs_path) for out in made.outs):
        remove_unfinished(output)
        for path in output.parent.glob(".*.tmp"):
            if DVC_TEMPORARY.fullmatch(path.name):
                path.unlink()


def repair_run_cache(repo: Any) -> None:
    """Remove what killed DVCs had not finished writing into the run cache, where DVC finds the
    outputs of a stage by its command and inputs: `.dvc/cache/runs/KE/KEY/VALUE`.

    With an empty folder of a KEY, every later `dvc repro` of its stage fails.

    Args:
        repo: the opened repository of the working directory.
    """
    for folder in Path(repo.stage_cache.cache_dir).glob("*/*"):
        with suppress(OSError):  # it is gone, or no longer empty: clones may share a cache
            names = [path.name for path in folder.iterdir()]
            if names and not any(name.endswith(".tmp") for name in names):
                continue
            age = time.time() - folder.stat().st_mtime
            time.sleep(min(max(WRITING_SECONDS - age, 0), WRITING_SECONDS))
            for path in folder.glob("*.tmp"):
                path.unlink()
            folder.rmdir()
