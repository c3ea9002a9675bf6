"""Several processes that share the work of a stage; on this machine, by torchrun's own agent.

The processes find each other by the environment that the agent gives them
(stages/lib/lm/world.py). If one of them ends, the agent ends the others, and if the agent ends,
the kernel ends all of them.
"""

import ctypes
import logging
import os
import signal
import sys
from uuid import uuid4

from stages.lib.core.errors import RondoError

PR_SET_PDEATHSIG = 1
AGENT = "RONDO_AGENT"  # its process id
# what torch's agent gives its processes, beside names with TORCHELASTIC_
OF_AGENT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# what the launchers of MPI and Accelerate leave in the environment of a job or a shell
OF_LAUNCHERS = ("OMPI_COMM_", "PMI_", "MPI_LOCAL", "MV2_COMM_", "ACCELERATE_")
# the next step after a process has ended
RUN_AGAIN = "run the stage again (`ppo` resumes from its last saved state)"
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def is_launched() -> bool:
    """Whether this process was started with others that share its work."""
    return AGENT in os.environ


def rank() -> int:
    """Number of this process among those that were started together, from 0."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """Number of the GPU of this process among those that it can see, from 0."""
    return int(os.environ["LOCAL_RANK"]) if is_launched() else 0


def hide_processes() -> None:
    """Let libraries that look for other processes, as Accelerate does, find none: this project
    shares the work itself. To be called after the processes have joined and their ranks are read.
    """
    for name in list(os.environ):
        if name in OF_AGENT or name.startswith(OF_LAUNCHERS):
            del os.environ[name]


def environment_alone() -> dict[str, str]:
    """The environment without what the agent has added: for a child that works alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (AGENT, *OF_AGENT) and not name.startswith("TORCHELASTIC_")
    }


def launch(module: str, arguments: list[str], processes: int) -> int:
    """Run `python -m module` as several processes, and wait for them.

    Returns:
        0, or the exit code of the process that failed first.

    Raises:
        RondoError: a signal has ended one of them.
    """
    # imported here: a stage of one process does not need it
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # its warnings and its summary repeat what the processes print themselves
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores() // processes, 1)))
    os.environ[AGENT] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        # a signal that nohup ignores stays ignored
        signals_to_handle=",".join(
            name for name in HANDLED if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
        ),
        shutdown_timeout=5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        if failure.exitcode < 0:
            ended_by = signal.Signals(-failure.exitcode)
            raise ended_by_signal(first, processes, ended_by) from error
        return int(failure.exitcode)
    except SignalException as error:
        # as the signal ends a stage of one process
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)
    return 0


def ended_by_signal(first: int, processes: int, ended_by: signal.Signals) -> RondoError:
    """The error if a signal ends a process; first: its rank."""
    return RondoError(
        f"process {first + 1} of {processes} was ended by {ended_by.name}, and the others with it. "
        f"Next: {RUN_AGAIN}"
    )


def cores() -> int:
    """The cores that this process may use: of its affinity, and of its container's CPU quota."""
    import joblib  # takes 0.2 s, and scikit-learn's users import it anyway

    return int(joblib.cpu_count())


def end_with_agent() -> None:
    """End this process if the agent ends, even by SIGKILL (Linux): the agent's processes are in
    sessions of their own, which an end of the agent's session does not reach.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[AGENT]):  # it has ended before
        sys.exit(1)
