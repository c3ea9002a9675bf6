"""What each of two processes does in test_processes.py: the stage ppo in one folder after the
other. A run whose folder's name ends with `_killed` is ended in its third update, and then runs
again; `killed` there has the state that it continues from.
"""

import os
import shutil
import sys

import pytest

from stages.lib.core.errors import print_failure
from stages.lib.core.params import Params, load_params
from stages.lib.core.processes import share_out
from stages.lib.lm import world
from stages.ppo.__main__ import main as policy
from stages.ppo.common.run import Run
from tests.stages.ppo.alternatives.kill import Killed, killed_before
from tests.stages.ppo.stage_process import delete_outputs


def run_killed(params: Params) -> None:
    """All processes end at the same moment; outputs are then deleted, as DVC does."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        killed_before(3, Run, "end_update", patch)
        policy(params, "r0")
    world.wait()
    if world.is_main():
        delete_outputs()
        shutil.copytree(".rondo", "killed")
    world.wait()


def main() -> None:
    folders = sys.argv[1:]
    os.chdir(folders[0])
    share_out("tests.stages.ppo.pair_program", folders, load_params(), "ppo", "r0")
    try:
        for folder in folders:
            os.chdir(folder)
            print(f"== {os.path.basename(folder)}", flush=True)
            params = load_params()
            if folder.endswith("_killed"):
                run_killed(params)
            policy(params, "r0")
            world.wait()
    except Exception as error:
        sys.exit(print_failure(error, "ppo@r0"))


if __name__ == "__main__":
    main()
