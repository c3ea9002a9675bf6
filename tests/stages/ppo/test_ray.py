"""PPO in two processes on two nodes of a real Ray cluster: the bytes of torchrun's two processes,
and loud ends from which one command goes on.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stages.lib.core.errors import Unreachable
from stages.lib.core.params import Params
from tests.paths import ROOT
from tests.ray_cluster import RealCluster, needs_ray, stage_processes
from tests.servers import until
from tests.stages.ppo.stage_process import delete_outputs, run_to_the_end, start, wait_for_updates
from tests.stages.ppo.test_processes import Results, results, write_params

pytestmark = needs_ray
ENDLESS = 6 * 10_000  # episodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    started = RealCluster(1, {"CUDA_VISIBLE_DEVICES": ""})
    started.start_node()
    yield started
    started.close()


def finish() -> Results:
    """Run to the end; what the run has computed."""
    for path in Path().glob("*.pids"):
        path.unlink()
    return results(run_to_the_end())


def delete_everything() -> None:
    delete_outputs()
    shutil.rmtree(".rondo", ignore_errors=True)


def run_until_killed(kill: Callable[[list[psutil.Process]], object], cluster: RealCluster) -> str:
    """The output of a run of which something is killed after two updates."""
    process = start()
    wait_for_updates(process, 2)
    running = stage_processes(cluster)
    assert len({node for _, node in running}) == 2, "a process on each node"
    ranks = [process for process, _ in running]
    kill(ranks)
    output, _ = process.communicate(timeout=200)
    assert process.returncode in (1, Unreachable.exit_code), output
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert not alive
    assert "Traceback" not in output and "the policy starts from" in output
    return output


def test_the_bytes_of_torchrun_also_if_a_process_a_node_or_the_head_is_killed(
    small_round: Params, cluster: RealCluster
) -> None:
    write_params(small_round, 2)
    torchrun = finish()
    delete_everything()
    write_params(small_round, 2, cluster.address)
    on_ray = finish()
    assert on_ray["bytes"] == torchrun["bytes"]
    assert "[ppo@r0] submitted the job rondo-ppo-r0-" in on_ray["output"]
    assert on_ray["output"].count("the policy starts from") == 1  # one of them prints

    def kill_node(_: object) -> None:
        cluster.kill(cluster.nodes[-1])

    def kill_head(_: object) -> None:
        cluster.kill(cluster.nodes[0])

    def start_again() -> None:
        for node in cluster.nodes[:]:
            if not cluster.alive():  # the nodes of a head end with it
                cluster.kill(node)
        if not cluster.nodes:
            cluster.start_head()
        cluster.start_node()

    kills: dict[str, tuple[Callable[[list[psutil.Process]], object], str, Callable[[], None]]] = {
        "process": (lambda ranks: ranks[1].kill(), "process 2 of 2 was ended by SIGKILL", print),
        "node": (kill_node, "is lost, or its node", start_again),
        "head": (kill_head, "ppo@r0: Unreachable: launcher.ray_address", start_again),
    }
    for what, (kill, message, repair) in kills.items():
        delete_everything()
        output = run_until_killed(kill, cluster)
        assert message in output, output
        delete_outputs()
        repair()
        resumed = finish()
        assert "resumes from here" in resumed["output"], what
        assert resumed["bytes"] == torchrun["bytes"], what


def test_one_process_on_a_node(small_round: Params, cluster: RealCluster) -> None:
    write_params(small_round, 1)
    here = finish()
    delete_everything()
    write_params(small_round, 1, cluster.address)
    assert finish()["bytes"] == here["bytes"]


def start_endless(
    params: Params, cluster: RealCluster
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A stage that does not end by itself, and its two processes, after an update."""
    write_params(params, 2, cluster.address, total_episodes=ENDLESS)
    process = start()
    wait_for_updates(process, 1)
    ranks = [each for each, _ in stage_processes(cluster)]
    assert len(ranks) == 2
    return process, ranks


def test_a_stage_that_is_told_to_end_ends_its_processes(
    small_round: Params, cluster: RealCluster
) -> None:
    process, ranks = start_endless(small_round, cluster)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


def test_the_next_run_ends_the_job_of_one_that_was_killed(
    small_round: Params, cluster: RealCluster
) -> None:
    process, ranks = start_endless(small_round, cluster)
    process.kill()
    process.communicate()
    assert all(each.is_running() for each in ranks)
    delete_outputs()
    write_params(small_round, 2, cluster.address)
    output = run_to_the_end()
    assert "[ppo@r0] stops the job rondo-ppo-r0-" in output
    assert not any(each.is_running() for each in ranks)


def test_processes_end_some_time_after_the_command_was_killed(
    small_round: Params, cluster: RealCluster
) -> None:
    write_params(small_round, 2, cluster.address, total_episodes=ENDLESS)
    program = (
        "from stages.lib.core.ray import launch; launch.PATIENCE_SECONDS = 3; "
        "from stages.ppo import __main__ as ppo; from stages.lib.core.stage import stage_main; "
        "stage_main('ppo', ppo.main)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--round", "r0"], env={"PYTHONPATH": str(ROOT)}
    )
    wait_for_updates(process, 1)  # type: ignore[arg-type]
    ranks = [each for each, _ in stage_processes(cluster)]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert len(ranks) == 2 and not alive


def test_what_a_stage_refuses_has_its_words_and_exit_code(
    small_round: Params, cluster: RealCluster
) -> None:
    write_params(small_round, 2, cluster.address)
    Path("rounds/r0/sft/model/config.json").unlink()
    process = start()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "ppo@r0: BadInput: " in output and "Traceback" not in output


def test_a_cluster_without_room_says_so(small_round: Params, cluster: RealCluster) -> None:
    write_params(small_round, 3, cluster.address)
    process = start()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "BadInput: launcher.processes is 3, but the cluster has room for 2 with" in output
    until(lambda: not stage_processes(cluster), 10)
