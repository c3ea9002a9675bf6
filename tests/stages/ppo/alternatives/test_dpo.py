"""DPO's loss and its rows."""

import json
import math
from pathlib import Path

import pytest
import torch

from stages.lib.core.files import read_jsonl
from stages.lib.data.splits import prompt_key
from stages.lib.lm.packing import padding_free
from stages.ppo.__main__ import main
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.dpo import NAMES, make_trainer, pairs
from stages.ppo.alternatives.run import load

PAIRS = Path("rounds/r0/annotate/data/pairs_train.jsonl")


@pytest.mark.parametrize(
    "lora",
    [{"r": 4}, {"r": 4, "top_layers": 1}, {"r": 0}],
    ids=["adapters", "above", "all weights"],
)
def test_before_anything_is_learnt_the_loss_is_log_2_and_then_it_falls(make_params, lora):
    params = make_params(
        "dpo",
        {"per_device_train_batch_size": 36, "learning_rate": 0.01, "num_train_epochs": 4},
        lora=lora,
    )
    main(params, "r0")
    losses = [
        json.loads(line)["loss"]
        for line in Path("rounds/r0/ppo/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[3] < losses[0] - 0.05


def test_pairs_are_of_prompts_that_are_not_held_out_tokenised_as_everywhere(make_params):
    setting = load(make_params("dpo"), "r0")
    rows = read_jsonl(PAIRS, "")
    held_out = {prompt_key(row["prompt"]) for row, _ in setting.held_out}
    left = [row for row in rows if prompt_key(row["prompt"]) not in held_out]
    made = pairs(rows, setting)
    assert len(left) == len(made) == 36 < len(rows)
    ids = lambda text: setting.tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    eos = setting.tokenizer.eos_token_id
    for row, pair in zip(left, made, strict=True):
        assert pair["prompt_ids"] == ids(row["prompt"])
        assert (pair["chosen_ids"], pair["rejected_ids"]) == (
            [*ids(row["chosen"]), eos],
            [*ids(row["rejected"]), eos],
        )


def test_the_loss_is_the_papers(make_params):
    """-log sigmoid(beta (log-ratio of chosen - log-ratio of rejected)), by transformers' logits."""
    setting = load(make_params("dpo", {"beta": 0.5}), "r0")
    rows = pairs(read_jsonl(PAIRS, ""), setting)[:5]
    trainer = make_trainer(setting, rows, PolicyCallback(setting, NAMES))
    model = trainer.model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def logprob(prompt: list[int], response: list[int]) -> float:
        logits = model.base_model.model.lm_head(
            model.base_model.model.base_model(torch.tensor([prompt + response])).last_hidden_state
        )
        told = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(told[range(len(response)), response].sum())

    def ratio(row: dict, side: str) -> float:
        own = logprob(row["prompt_ids"], row[side])
        with model.disable_adapter():
            return own - logprob(row["prompt_ids"], row[side])

    margins = torch.tensor([ratio(row, "chosen_ids") - ratio(row, "rejected_ids") for row in rows])
    expected = -torch.nn.functional.logsigmoid(0.5 * margins).mean()
    with padding_free(model):
        loss = trainer.compute_loss(model, trainer.data_collator(rows))
    assert (
        float(loss) == pytest.approx(float(expected), abs=1e-5)
        and abs(float(loss) - math.log(2)) > 1e-3
    )
