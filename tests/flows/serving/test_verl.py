"""verl's own reward loop, with Rondo's rewards, against a server of the reward model: the scores
are those of Rondo's stages. The server stands in for vLLM, which has the same protocol and needs a
GPU.
"""

from typing import Any

import pytest
import torch

from stages.lib.core.files import read_json, write_json
from stages.lib.core.params import check_params
from stages.ppo.common.rewards import shape_scores
from stages.ppo.engines import rondo_check
from stages.ppo.engines.verl import VerlJob
from tests import engine_settings
from tests.flows.serving.test_app import PROMPTS, RESPONSES
from tests.stages.ppo.engines.jobs import needs_verl, unpack_verl

pytestmark = needs_verl


@pytest.fixture
def job(models, scorer, tmp_path) -> VerlJob:
    ppo = engine_settings.VERL | {"missing_eos_penalty": 0.25, "score_clip": 1.0}
    launcher = {"ray_address": "http://ray:8265", "gpus_per_node": 1}
    params = check_params(
        {
            "ppo": ppo,
            "launcher": launcher,
            **scorer.params.model_dump(mode="json", include={"model", "assets"}),
        },
        "test",
    )
    made = VerlJob(params, tmp_path / "job", models / "assets/model", models / "reward")
    ids = [scorer.tokenizer(prompt).input_ids for prompt in PROMPTS]
    rows = [{"id": prompt, "prompt": prompt} for prompt in PROMPTS]
    made.write_inputs(list(zip(rows, ids, strict=True)), scorer.tokenizer)
    path = (made.folder / made.plugin).with_suffix(".json")
    numbers = read_json(path, "")
    assert (numbers["mean"], numbers["std"]) == (0.5, 2.0)
    write_json(path, numbers | {"mean": 0.0, "std": 1.0})  # the server has calibrated, unlike vLLM
    return made


def padded(sequences: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences))
    rows = torch.tensor([row + [pad] * (width - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sequences])
    return rows, mask


def test_rewards_are_those_of_the_stages(job, serve, scorer, monkeypatch):
    monkeypatch.syspath_prepend(str(unpack_verl()))
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    sequences = scorer.encode(PROMPTS, RESPONSES)
    prompts = [scorer.tokenizer(prompt).input_ids for prompt in PROMPTS]
    responses = [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
    responses[0] = responses[0][:-1]  # cut off: no EOS
    fields: dict[str, Any] = {}
    (fields["prompts"], first), (fields["responses"], second) = (
        padded(rows, scorer.tokenizer.pad_token_id) for rows in (prompts, responses)
    )
    fields["attention_mask"] = torch.cat([first, second], 1)
    data = DataProto(batch=TensorDict(fields, batch_size=len(PROMPTS)))
    worker = RewardLoopWorker(rondo_check.verl(job.arguments()), serve().removeprefix("http://"))
    made = worker.loop.run_until_complete(worker.compute_score_batch(data))
    expected = shape_scores(
        torch.tensor(scorer(PROMPTS, RESPONSES)),
        torch.tensor([False] + [True] * (len(PROMPTS) - 1)),
        torch.tensor([len(response) for response in responses]),
        clip=1.0,
        missing_eos_penalty=0.25,
        length_penalty=0.0,
        free_length=0,
    )
    assert [one["reward_score"] for one in made] == pytest.approx(expected.tolist(), abs=1e-6)
