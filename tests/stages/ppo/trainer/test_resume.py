"""A run that is killed again and again ends with the same bits as one that is not."""

import json
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.assets.inputs import main as inputs
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import Algorithm
from stages.ppo.__main__ import main
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.ppo.stage_process import (
    delete_outputs,
    outputs,
    run_to_the_end,
    start,
    wait_for_updates,
)

UPDATES = 12


def kill_after(updates: int, kill_signal: signal.Signals) -> float:
    """Kill a run when its metrics have `updates` lines; returns the seconds until it ended."""
    process = start()
    wait_for_updates(process, updates)
    process.send_signal(kill_signal)
    sent = time.monotonic()
    assert process.wait(20) == -kill_signal
    delete_outputs()
    return time.monotonic() - sent


def test_killed_at_three_moments_and_started_again(make_round):
    params = make_round("r0", 1.0)
    changes = {
        "batch_size": 4,
        "mini_batch_size": 2,
        "micro_batch_size": 2,
        "total_episodes": 4 * UPDATES,
        "save_updates": 4,
    }
    params = check_params(
        params.model_dump() | {"ppo": params.ppo.model_dump() | changes | {"on_danger": "warn"}},
        "test",
    )
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    delete_outputs()

    run_to_the_end()
    expected = outputs()
    assert {
        "metrics.jsonl",
        "rollouts/00001.jsonl.gz",
        "policy/adapter_model.safetensors",
        "checkpoints/step_00008/adapter_model.safetensors",
    } <= (expected.keys())
    delete_outputs()

    kill_after(1, signal.SIGKILL)
    assert kill_after(5, signal.SIGTERM) < 10
    # not after the last update, since the run may end before the signal arrives
    kill_after(UPDATES - 1, signal.SIGKILL)
    assert "resumes from here" in run_to_the_end()
    assert outputs() == expected
    # DVC could not record the outputs: the run ends again, without another update
    delete_outputs()
    assert f"step {UPDATES}/{UPDATES}  eta 0:00  resumes from here" in run_to_the_end()
    assert outputs() == expected


class Killed(BaseException):
    """Ends a process as a kill does: nothing handles it."""


def train_until(update: int | None, params: Params, patch: pytest.MonkeyPatch) -> None:
    """Run the stage; killed in this update, after its optimizer steps."""
    step = PpoTrainer.step

    def killed(trainer: PpoTrainer) -> Any:
        result = step(trainer)
        if trainer.updates == update:
            raise Killed
        return result

    with patch.context() as within, suppress(Killed):
        within.setattr(PpoTrainer, "step", killed)
        main(params, "r0")


def with_ppo(params: Params, **changes: object) -> Params:
    """Six short updates."""
    ppo = params.ppo.model_dump()
    ppo |= {"batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 2, "num_ppo_epochs": 1}
    ppo |= {"total_episodes": 4 * 6, "save_updates": 2, "learning_rate": 1e-2}
    return check_params(
        params.model_dump() | {"ppo": ppo | {"on_danger": "warn"} | changes}, "test"
    )


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_updates_after_the_last_saved_state_are_made_again(
    make_round, monkeypatch, capsys, algorithm
):
    """The state is saved after every fourth update: a run that is killed in the sixth one continues
    with the fifth. The reward model is the judge here, so that a trained policy is kept.
    """
    params = with_ppo(make_round("r0", 1.0), resume_updates=4)
    params = params.model_copy(update={"algorithm": Algorithm(algorithm)})
    shutil.copytree("rounds/r0/reward/model", "judge")
    params.evaluate.judges = ["judge"]
    inputs(params, "r0")
    shutil.rmtree("rounds/r0/ppo")
    train_until(None, params, monkeypatch)
    expected = outputs()
    assert json.loads(expected["metrics.json"])["policy_update"] in (2, 4, 6)
    shutil.rmtree("rounds/r0/ppo")
    shutil.rmtree(".rondo")
    train_until(6, params, monkeypatch)
    assert len(Path("rounds/r0/ppo/metrics.jsonl").read_text().splitlines()) == 5
    shutil.rmtree("rounds/r0/ppo")
    assert "resumes from here" not in capsys.readouterr().out
    train_until(None, params, monkeypatch)
    assert "step 4/6" in next(
        line for line in capsys.readouterr().out.splitlines() if "resumes from here" in line
    )
    assert outputs() == expected


def test_a_run_with_other_settings_starts_anew(make_round, monkeypatch, capsys):
    params = make_round("r0", 1.0)
    train_until(3, with_ppo(params), monkeypatch)
    train_until(1, with_ppo(params, kl_coef=0.2), monkeypatch)
    assert "resumes from here" not in capsys.readouterr().out
    train_until(3, with_ppo(params), monkeypatch)
    assert "resumes from here" in capsys.readouterr().out
