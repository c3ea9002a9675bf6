"""DPO's loss and its rows."""

import json
import math
from pathlib import Path

import pytest
import torch
from trl.trainer import utils as trl_utils

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.lib.core.params.policy import DpoParams
from stages.lib.data.splits import prompt_key
from stages.lib.lm.packing import padding_free
from stages.lib.training.trl_setup import CPU_TILE_VOCABULARY
from stages.ppo.__main__ import main
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.dpo import NAMES, make_trainer, tokenise_pairs
from stages.ppo.alternatives.run import load

PAIRS = Path("rounds/r0/annotate/data/pairs_train.jsonl")


@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 0}], ids=["adapters", "all weights"])
def test_the_loss_is_log_2_at_the_start_and_then_falls(make_params, lora):
    params = make_params(
        "dpo",
        {
            "per_device_train_batch_size": 36,
            "learning_rate": 0.01,
            "num_train_epochs": 4,
            "loss_type": ["sigmoid"],
            "loss_weights": None,
        },
        lora=lora,
    )
    main(params, "r0")
    losses = [
        json.loads(line)["loss"]
        for line in Path("rounds/r0/ppo/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[3] < losses[0] - 0.05


def test_trl_computes_logits_of_responses_alone_and_in_tiles(make_params, monkeypatch):
    """One batch has all pairs; policy and reference read them. The tiles are those of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    function, tiles = trl_utils._ChunkedLogProbFunction, []
    apply = function.apply

    def record(hidden, weight, bias, targets, temperature, width, *rest):
        tiles.append((len(targets), width))
        return apply(hidden, weight, bias, targets, temperature, width, *rest)

    monkeypatch.setattr(function, "apply", record)
    params = make_params("dpo", {"per_device_train_batch_size": 36}, max_steps=1)
    context = load(params, "r0")
    pairs = tokenise_pairs(read_jsonl(PAIRS, ""), context)
    main(params, "r0")
    tokens = sum(len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in pairs)
    assert len(pairs) == 36 and tiles == [(tokens, CPU_TILE_VOCABULARY)] * 2


def test_pairs_have_no_held_out_prompts_and_are_tokenised_as_in_other_stages(make_params):
    context = load(make_params("dpo"), "r0")
    rows = read_jsonl(PAIRS, "")
    held_out = {prompt_key(row["prompt"]) for row, _ in context.held_out}
    train_rows = [row for row in rows if prompt_key(row["prompt"]) not in held_out]
    pairs = tokenise_pairs(rows, context)
    assert len(train_rows) == len(pairs) == 36 < len(rows)
    eos = context.tokenizer.eos_token_id

    def ids(text: str) -> list[int]:
        return context.tokenizer(text, add_special_tokens=False).input_ids

    for row, pair in zip(train_rows, pairs, strict=True):
        assert pair["prompt_ids"] == ids(row["prompt"])
        assert pair["chosen_ids"] == [*ids(row["chosen"]), eos]
        assert pair["rejected_ids"] == [*ids(row["rejected"]), eos]


def test_pairs_are_as_long_as_samples_and_never_prefer_no_end_to_an_end(make_params):
    """Each response is short or long, and each pair has another combination."""
    context = load(make_params("dpo", response_length=8), "r0")
    short, long = " was good", " was good" * 9
    rows = [
        {"id": "", "prompt": "New", "chosen": chosen, "rejected": rejected}
        for chosen in (short, long)
        for rejected in (short, long)
    ]
    tokens = context.tokenizer([short, long], add_special_tokens=False).input_ids
    ended, cut = [*tokens[0], context.tokenizer.eos_token_id], tokens[1][:8]
    assert len(ended) <= 8 < len(tokens[1])
    pairs = tokenise_pairs(rows, context)
    assert [(pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs] == [
        (ended, ended),
        (ended, cut),
        (cut, cut),
    ]
    prompt = pairs[0]["prompt_ids"]
    assert [pair["length"] - len(prompt) for pair in pairs] == [len(ended), 8, 8]


def test_pairs_that_all_prefer_no_end_are_refused(make_params):
    context = load(make_params("dpo", response_length=8), "r0")
    row = {"id": "1", "prompt": "New", "chosen": " was good" * 9, "rejected": "."}
    with pytest.raises(BadInput, match=r"all 1 pairs.*ppo\.response_length \(8 tokens"):
        tokenise_pairs([row], context)


@pytest.mark.parametrize(
    ("losses", "weights"),
    [(["sigmoid"], None), (["sigmoid", "sft"], [2.0, 0.5]), (["sigmoid_norm"], None)],
)
def test_the_loss_is_the_papers(make_params, shift, losses, weights):
    """-log sigmoid(beta (log-ratio of chosen - log-ratio of rejected)), by transformers' logits;
    with the mean loss of the chosen tokens (Pang et al. 2024), or with log-ratios per token.
    """
    section = {"beta": 0.5, "loss_type": losses, "loss_weights": weights}
    context = load(make_params("dpo", section), "r0")
    pairs = tokenise_pairs(read_jsonl(PAIRS, ""), context)[:5]
    trainer = make_trainer(context, pairs, PolicyCallback(context, NAMES))
    model = trainer.model
    shift(model, 0.1)

    @torch.no_grad()
    def logprob(prompt: list[int], response: list[int]) -> float:
        inner = model.base_model.model
        ids = torch.tensor([prompt + response], device=model.device)
        states = inner.base_model(ids).last_hidden_state
        logprobs = inner.lm_head(states)[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(logprobs[range(len(response)), response].sum())

    def log_ratio(pair: dict, side: str) -> float:
        policy_logprob = logprob(pair["prompt_ids"], pair[side])
        with model.disable_adapter():
            return policy_logprob - logprob(pair["prompt_ids"], pair[side])

    def length(pair: dict, side: str) -> int:
        return len(pair[side]) if losses == ["sigmoid_norm"] else 1

    margins = torch.tensor(
        [
            log_ratio(pair, "chosen_ids") / length(pair, "chosen_ids")
            - log_ratio(pair, "rejected_ids") / length(pair, "rejected_ids")
            for pair in pairs
        ]
    )
    expected = -torch.nn.functional.logsigmoid(0.5 * margins).mean()
    if "sft" in losses:
        logprobs = [logprob(pair["prompt_ids"], pair["chosen_ids"]) for pair in pairs]
        tokens = sum(len(pair["chosen_ids"]) for pair in pairs)
        expected = 2 * expected - 0.5 * sum(logprobs) / tokens
    with padding_free(model):
        batch = trainer._prepare_inputs(trainer.data_collator(pairs))  # on the model's device
        loss = trainer.compute_loss(model, batch)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    assert abs(float(loss) - math.log(2)) > 1e-3


def test_as_many_weights_as_losses():
    with pytest.raises(ValueError, match="loss_weights has 2 numbers and loss_type 1 losses"):
        DpoParams(loss_type=["sigmoid"], loss_weights=[1.0, 0.5])
