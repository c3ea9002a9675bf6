"""The policy stage in two processes does what it does in one, also if it is killed and resumed, and
all of them end together.

To start two processes takes longer than their runs, so that one pair makes most of them, one after
the other (pair_program.py). Runs of one process are made by the tests' own.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from flows.execution import fork_server
from stages.assets.inputs import main as inputs
from stages.lib.core.files import read_json, read_jsonl
from stages.lib.core.params import Params, check_params, load_params
from stages.ppo.__main__ import main as policy
from stages.ppo.common.run import Run
from tests.paths import ROOT
from tests.servers import until
from tests.stages.ppo.alternatives.kill import run_killed
from tests.stages.ppo.stage_process import OUTPUTS, outputs, start, wait_for_updates
from tests.stages.shared_program import alternative

Results = dict[str, Any]

UPDATES = 3
# A judge, and a reward that fails for one prompt; both note which process has called them
FUNCTIONS = """import os


def note(name):
    with open(f"{name}.pids", "a") as stream:
        print(os.getpid(), file=stream)


def judge(prompts, responses):
    note("judge")
    return [len(set(response)) / 9 for response in responses]


def reward(prompts, responses):
    note("reward")
    return [
        None if prompt == "The walk" else len(response) / 9
        for prompt, response in zip(prompts, responses)
    ]
"""
# one micro-batch is all episodes of a process, and the mini-batch is the whole batch
WHOLE_BATCH = {"mini_batch_size": 6, "micro_batch_size": 6, "total_episodes": 12, "rewards": []}
# in micro-batches of one episode, so that one process has more of them than the other
ALL_WEIGHTS = {"lora": {"r": 0}, "critic_lora": {"r": 0}, "learning_rate": 1e-3}
ALL_WEIGHTS |= {"micro_batch_size": 1}
# ranks that only sleep, started as a stage starts its own
SLEEPERS = """
import os
import time
from pathlib import Path
from stages.lib.core.params import load_params
from stages.lib.core.processes import share_out
share_out("sleepers", [], load_params(), "ppo", "r0")
Path("asleep-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are GPUs: several processes need several of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_params(
    params: Params, processes: int, cluster: str = "", shard: bool = False, **changes: object
) -> None:
    """Updates of 6 episodes, each of two epochs of two mini-batches of 3; two processes have
    micro-batches of one and two episodes, one process has three. cluster: of Ray.
    """
    ppo = {"batch_size": 6, "mini_batch_size": 3, "micro_batch_size": 3, "num_ppo_epochs": 2}
    ppo |= {"total_episodes": 6 * UPDATES, "save_updates": 2, "learning_rate": 5e-3}
    ppo |= {
        "rewards": [{"name": "size", "function": "noting:reward"}],
        "max_failed_rewards": 0.5,
    }
    values = params.model_dump(mode="json")
    values["ppo"] |= ppo | {"on_danger": "warn", "resume_updates": 1} | changes
    values["launcher"] = {"processes": processes, "shard": shard}
    if cluster:
        values["launcher"] |= {"type": "ray", "ray_address": cluster}
    values["evaluate"]["judges"] = ["noting:judge"]
    Path("noting.py").write_text(FUNCTIONS)
    checked = check_params(values, "test")
    Path("params.yaml").write_text(yaml.safe_dump(checked.model_dump(mode="json")))
    inputs(checked, "r0")


def results(output: str) -> Results:
    """What a run in this folder has computed."""
    for path in Path().glob("*.pids"):
        assert len({*path.read_text().splitlines()}) == 1, "one process calls it"
    assert Path("judge.pids").exists()
    rollouts = [row for path in sorted(OUTPUTS.glob("rollouts/*")) for row in read_jsonl(path, "")]
    return {
        "output": output,
        "steps": read_jsonl(OUTPUTS / "metrics.jsonl", ""),
        "metrics": read_json(OUTPUTS / "metrics.json", ""),
        "manifest": read_json(OUTPUTS / "manifest.json", ""),
        "texts": [row["response"] for row in rollouts],
        "models": {
            str(path.relative_to(OUTPUTS)): load_file(path)
            for path in OUTPUTS.rglob("*.safetensors")
        },
        "bytes": outputs(),
    }


def assert_close(actual: Results, expected: Results) -> None:
    """Sums of other parts are rounded otherwise, in float32 by 1e-7 of their size."""
    for step, expected_step in zip(actual["steps"], expected["steps"], strict=True):
        assert step == pytest.approx(expected_step, rel=1e-3, abs=1e-5)
    assert {"policy", "checkpoints"} == {name.split("/")[0] for name in actual["models"]}
    torch.testing.assert_close(actual["models"], expected["models"], rtol=0, atol=1e-5)
    kept = ("policy_update", "stopped")
    assert [actual["metrics"][name] for name in kept] == [
        expected["metrics"][name] for name in kept
    ]
    scale = expected["metrics"]["policy_scale"]
    assert actual["metrics"]["policy_scale"] == pytest.approx(scale, rel=1e-3)


@contextmanager
def nothing_is_left(process: subprocess.Popen[str]) -> Iterator[list[psutil.Process]]:
    """The two processes of a stage; after the block, they end."""
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        assert process.poll() is None, process.communicate()[0]
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
        time.sleep(0.01)
    yield ranks
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


def kill_one_of_two(updates: int) -> None:
    """Start the stage, and kill its second process after some updates: all end."""
    process = start()
    wait_for_updates(process, updates)
    with nothing_is_left(process) as ranks:
        ranks[1].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "process 2 of 2 was ended by SIGKILL, and the others with it" in output
    assert "Traceback" not in output


def spoil_a_token() -> None:
    """The reward model's state of the last prompt's last token is NaN, which is met by the process
    that gets this prompt.
    """
    prompts = read_jsonl(Path("rounds/r0/prepare/data/prompts_train.jsonl"), "")
    tokenizer = AutoTokenizer.from_pretrained("rounds/r0/sft/model")
    model = Path("rounds/r0/reward/model/model.safetensors")
    weights = load_file(model)
    weights["model.embed_tokens.weight"][tokenizer(prompts[-1]["prompt"]).input_ids[-1]] = torch.nan
    save_file(weights, model, {"format": "pt"})


class Runs:
    """Runs in folders of their own, each a copy of one round."""

    def __init__(self, params: Params, parent: Path) -> None:
        self.params, self.parent, self.round = params, parent, Path.cwd()
        self.made: dict[str, Results] = {}

    def prepare(
        self, name: str, processes: int, state: str = "", algorithm: str = "ppo", **changes: object
    ) -> Path:
        """A folder for a run; `state`: of a run that was killed, relative to all folders."""
        folder = self.parent / name
        shutil.copytree(self.round, folder, symlinks=True)
        if state:
            shutil.copytree(self.parent / state, folder / ".rondo", dirs_exist_ok=True)
        ppo = algorithm == "ppo"
        with chdir(folder):
            write_params(
                self.params if ppo else alternative(self.params, algorithm), processes, **changes
            )
        return folder

    def alone(self, name: str, state: str = "", killed: bool = False, **changes: object) -> None:
        """Run in this process; `killed`: it is ended in its third update first."""
        with chdir(self.prepare(name, 1, state, **changes)):
            params = load_params()
            if killed:
                run_killed(params, (3, Run, "end_update"), pytest.MonkeyPatch())
                shutil.copytree(".rondo", "killed")
            with redirect_stdout(io.StringIO()) as stream:
                policy(params, "r0")
            self.made[name] = results(stream.getvalue())

    def pair(self, folders: list[Path]) -> None:
        """Run in two processes, one folder after the other; the last run fails."""
        run = subprocess.run(
            [fork_server.python(), "-m", "tests.stages.ppo.pair_program", *map(str, folders)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1100,
        )
        parts = run.stdout.split("== ")
        assert len(parts) == len(folders) + 1, run.stdout
        for folder, part in zip(folders[:-1], parts[1:-1], strict=True):
            with chdir(folder):
                self.made[folder.name] = results(part)
        self.made[folders[-1].name] = {"code": run.returncode, "output": parts[-1]}

    def make_all(self) -> None:
        self.alone("one", killed=True)
        with chdir(self.prepare("two_killed", 2)):
            kill_one_of_two(2)
        with chdir(nan := self.prepare("nan", 2)):
            spoil_a_token()
        sharded: dict[str, Any] = {"shard": True} | ALL_WEIGHTS
        self.pair(
            [
                self.prepare("two", 2),
                self.prepare("two_of_two", 2, "two_killed/.rondo"),
                self.prepare("two_of_one", 2, "one/killed"),
                self.prepare("batch_of_two", 2, **WHOLE_BATCH),
                self.prepare("sharded", 2, **sharded),
                self.prepare("sharded_killed", 2, **sharded),
                self.prepare("dpo", 2, algorithm="dpo", rewards=[]),
                self.prepare("dpo_killed", 2, algorithm="dpo", rewards=[]),
                nan,
            ]
        )
        self.alone("one_of_two", "two_killed/.rondo")
        self.alone("batch_of_one", **WHOLE_BATCH)
        self.alone("whole", **ALL_WEIGHTS)
        self.alone("one_of_sharded", "sharded_killed/killed", **ALL_WEIGHTS)


@pytest.fixture(scope="module")
def made() -> list[Runs]:
    return []


@pytest.fixture
def runs(
    made: list[Runs], small_round: Params, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Results]:
    """The results of all runs by name, which the first test makes."""
    if not made:
        made.append(Runs(small_round, tmp_path_factory.mktemp("runs")))
        made[0].make_all()
    return made[0].made


RESUMED = "resumes from here"


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("two", "one"),
        ("two_of_one", "one"),
        ("one_of_two", "one"),
        ("batch_of_two", "batch_of_one"),
        ("sharded", "whole"),
        ("one_of_sharded", "whole"),
    ],
)
def test_two_processes_do_what_one_does(
    runs: dict[str, Results], actual: str, expected: str
) -> None:
    """`two_of_one`: they continue a run of one process that was killed, and so on."""
    assert_close(runs[actual], runs[expected])
    assert runs[actual]["texts"] == runs[expected]["texts"]
    assert (RESUMED in runs[actual]["output"]) == ("_of_" in actual and "batch" not in actual)


@pytest.mark.parametrize(
    ("resumed", "undisturbed"),
    [("two_of_two", "two"), ("sharded_killed", "sharded"), ("dpo_killed", "dpo")],
)
def test_as_many_processes_continue_with_the_same_bits(
    runs: dict[str, Results], resumed: str, undisturbed: str
) -> None:
    assert RESUMED in runs[resumed]["output"]
    assert RESUMED not in runs[undisturbed]["output"]
    assert runs[resumed]["bytes"] == runs[undisturbed]["bytes"]


def test_what_two_processes_share(runs: dict[str, Results]) -> None:
    assert RESUMED in runs["one"]["output"]
    assert {0.0} < {step["reward_failed_share"] for step in runs["two"]["steps"]}
    assert runs["two"]["output"].count("distinct_2") == UPDATES, "one of them prints"
    manifests = {name: runs[name]["manifest"] for name in ("one", "two", "dpo")}
    assert [manifest["processes"] for manifest in manifests.values()] == [1, 2, 2]
    assert manifests["dpo"]["algorithm"] == "dpo"
    # of 73,984 weights in layers the half, and 27,904 of embeddings and norm
    assert "each process holds 63.7% of the policy's weights" in runs["sharded"]["output"]


def test_all_processes_stop_if_one_meets_nan(runs: dict[str, Results]) -> None:
    code, output = runs["nan"]["code"], runs["nan"]["output"]
    assert code == 1 and "raw_scores" in output and "not finite" in output, output
    assert output.count("the policy starts from") == 1  # no restart


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_one_that_started_them(
    small_round: Params, number: signal.Signals
) -> None:
    write_params(small_round, 2)
    Path("sleepers.py").write_text(SLEEPERS)
    process = subprocess.Popen(
        [sys.executable, "-m", "sleepers"], stdout=subprocess.PIPE, text=True
    )
    with nothing_is_left(process):
        until(lambda: len([*Path().glob("asleep-*")]) == 2, 60)
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -number, output
