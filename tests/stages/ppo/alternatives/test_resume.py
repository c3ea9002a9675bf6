"""DPO or best-of-n that is killed ends with the same bytes as one that is not."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.lib.core.errors import RewardsFailed, RondoError
from stages.lib.core.files import file_hash
from stages.ppo.__main__ import main
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.stage import TrainedPolicy
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.resume import Resume
from tests.stages.ppo.alternatives.kill import (
    FOLDER,
    SECTIONS,
    Killed,
    killed_before,
    run_killed,
)
from tests.stages.ppo.servers import length_server


@pytest.mark.parametrize(("algorithm", "lora"), [("best_of_n", 4), ("dpo", 0)])
def test_killed_and_started_again(make_params, monkeypatch, capsys, algorithm, lora):
    params = make_params(
        algorithm,
        SECTIONS[algorithm],
        learning_rate=0.01,
        lora={"r": lora},
        total_episodes=32,
        num_ppo_epochs=2,
        on_danger="warn",
    )
    main(params, "r0")
    expected = hashes()
    shutil.rmtree(FOLDER)
    shutil.rmtree(".rondo/work/r0/ppo")
    capsys.readouterr()

    # before the first state; before that of the third update; in the fourth update
    run_killed(params, (1, Resume, "save"), monkeypatch)
    run_killed(params, (3, Resume, "save"), monkeypatch)
    assert "resumes from here" not in capsys.readouterr().out
    run_killed(params, (2, PolicyCallback, "end_update"), monkeypatch)
    assert "step 2/" in resumed_line(capsys)
    # at the end, while the policy is scaled
    run_killed(params, (1, PolicySelector, "_scale_to_target"), monkeypatch)
    assert "step 3/" in resumed_line(capsys)
    with monkeypatch.context() as within, suppress(Killed):
        # nothing is trained any more
        killed_before(1, PolicyCallback, "on_log", within)
        main(params, "r0")
    assert hashes() == expected
    # older checkpoints of the trainer are gone
    assert len(list(Path(".rondo/work/r0/ppo").glob("*/trainer/checkpoint-*"))) == 1


def test_another_reference_than_that_of_the_state_is_refused(make_params, monkeypatch):
    params = make_params("dpo", SECTIONS["dpo"])
    run_killed(params, (2, Resume, "save"), monkeypatch)
    [path] = Path(".rondo/work/r0/ppo").glob("*/state.pt")
    resume = Resume(path.parent.parent, {})
    resume.path = path
    resume.save(torch.load(path) | {"reference": "of another machine"})
    with pytest.raises(RondoError, match="after the resume, the weights of the reference"):
        main(params, "r0")


def test_another_model_behind_a_reward_server_is_refused_after_a_resume(make_params, monkeypatch):
    with length_server() as server:
        params = make_params(
            "rloo", SECTIONS["rloo"], rewards=[{"name": "far", "url": server.url}], score_clip=100.0
        )
        run_killed(params, (2, Resume, "save"), monkeypatch)
        server.model = "length-2"
        with pytest.raises(RewardsFailed, match="model length-1, and now states length-2"):
            main(params, "r0")


def hashes() -> dict[str, str]:
    files = (path for path in FOLDER.rglob("*") if path.is_file())
    return {str(path.relative_to(FOLDER)): file_hash(path) for path in files}


def resumed_line(capsys: Any) -> str:
    return next(line for line in capsys.readouterr().out.splitlines() if "resumes" in line)


def test_best_of_n_does_not_sample_its_responses_again(make_params, monkeypatch):
    params = make_params("best_of_n", SECTIONS["best_of_n"])
    run_killed(params, (2, Resume, "save"), monkeypatch)
    sizes, sample = [], TrainedPolicy.sample

    def counted(self: TrainedPolicy, prompt_ids: Any, *args: Any) -> Any:
        sizes.append(len(prompt_ids))
        return sample(self, prompt_ids, *args)

    monkeypatch.setattr(TrainedPolicy, "sample", counted)
    main(params, "r0")
    prompts = len(Path("rounds/r0/prepare/data/prompts_train.jsonl").read_text().splitlines())
    assert sizes and max(sizes) <= prompts
