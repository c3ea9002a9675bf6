"""DPO (Rafailov et al. 2023) on the pairs that the reward model is trained on.

Training needs neither the reward model nor samples of the policy.
"""

from typing import Any, TypedDict

from datasets import Dataset
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir
from stages.lib.core.params.policy import DpoLoss
from stages.lib.core.progress import print_line, progress
from stages.lib.core.rows import SIDES, PreferencePair, read_rows
from stages.lib.core.types import TokenIds
from stages.lib.data.lengths import tokenize_fitting
from stages.lib.data.splits import prompt_key
from stages.lib.lm import world
from stages.lib.lm.lora import lora_config
from stages.lib.training.trl_setup import ROWS, SharedTraining
from stages.ppo.alternatives.callback import PolicyCallback, offline_arguments
from stages.ppo.alternatives.stage import TrainingContext

NAMES = {name: name for name in ("loss", "grad_norm", "learning_rate")} | {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
}


class TokenizedPair(TypedDict):
    """TRL's columns. length: tokens of the prompt and the longer response."""

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    length: int


class SharedDpoTrainer(SharedTraining, DPOTrainer):
    """DPOTrainer on rows that are tokens already.

    TRL tokenises prompt and response as one text, which gives other tokens where they meet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_weights: list[float]  # TRL's
        self.configured_weights = list(self.loss_weights)

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if world.size() > 1:
            self.loss_weights = self.own_weights(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def own_weights(self, inputs: dict[str, Any]) -> list[float]:
        """The weights of the losses in this process: `sft` is a mean over the tokens of the chosen
        responses, not over pairs, so its weight makes up for a process's other share of them.
        """
        own_rows, all_rows = inputs[ROWS]
        chosen, _ = inputs["completion_mask"][:, 1:].chunk(2)  # of what the model predicts
        own_tokens = chosen.sum() * (own_rows > 0)
        all_tokens = own_tokens.clone()
        world.add_up([all_tokens])
        factor = float(own_tokens / all_tokens) * all_rows / max(own_rows, 1)
        return [
            weight * factor if loss == DpoLoss.sft.value else weight
            for loss, weight in zip(self.loss_types, self.configured_weights, strict=True)
        ]


def train(context: TrainingContext) -> PolicyCallback:
    round_ = context.recorder.round
    path = stage_dir(round_, "annotate") / "data/pairs_train.jsonl"
    rows = read_rows(PreferencePair, path)
    callback = PolicyCallback(context, NAMES)
    trainer = make_trainer(context, tokenise_pairs(rows, context), callback)
    callback.begin(trainer.model)
    callback.train(trainer)
    return callback


def make_trainer(
    context: TrainingContext, pairs: list[TokenizedPair], callback: PolicyCallback
) -> SharedDpoTrainer:
    """TRL's trainer on pairs from `tokenise_pairs`."""
    params, dpo, lora = context.params, context.params.dpo, context.params.ppo.lora
    arguments = offline_arguments(context, dpo, params.reward.max_length)
    with progress("preparing the training"):
        return SharedDpoTrainer(
            model=context.sft,
            args=DPOConfig(
                **arguments,
                beta=dpo.beta,
                loss_type=[loss.value for loss in dpo.loss_type],
                loss_weights=dpo.loss_weights,
                # the column `length` is not of TRL's, but pairs are batched by it
                remove_unused_columns=False,
            ),
            train_dataset=Dataset.from_list(pairs),
            processing_class=context.tokenizer,
            callbacks=[callback],
            # a config, since of a ready PeftModel TRL would keep a copy as the reference
            peft_config=lora_config(lora, "CAUSAL_LM", context.sft) if lora.r else None,
        )


def tokenise_pairs(rows: list[PreferencePair], context: TrainingContext) -> list[TokenizedPair]:
    """Pairs for TRL, as the policy could have sampled them: at most `ppo.response_length` tokens,
    without EOS if cut.

    Left out are pairs of held-out prompts, which validate the policy, and pairs that would teach
    the policy not to end: only their chosen response is cut.

    Raises:
        BadInput: no pair is left.
    """
    params = context.params
    held_out = {prompt_key(row["prompt"]) for row, _ in context.held_out}

    training_rows = [row for row in rows if prompt_key(row["prompt"]) not in held_out]
    if not training_rows:
        raise BadInput(
            f"all {len(rows)} pairs are of held-out prompts: lower ppo.validation_prompts, "
            "or add pairs"
        )
    fitting = tokenize_fitting(context.tokenizer, training_rows, SIDES, params, "reward")
    limit = params.ppo.response_length
    pairs: list[TokenizedPair] = [
        {
            "prompt_ids": prompt,
            "chosen_ids": chosen[:limit],
            "rejected_ids": rejected[:limit],
            "length": len(prompt) + min(limit, max(len(chosen), len(rejected))),
        }
        for prompt, chosen, rejected in zip(
            fitting.prompts, *(fitting.responses[side] for side in SIDES), strict=True
        )
        if len(chosen) <= limit or len(rejected) > limit
    ]
    if left_out := len(fitting.rows) - len(pairs):
        print_line(
            f"[{context.recorder.label}] {left_out} of {len(fitting.rows)} pairs are left out: "
            "only their chosen response is longer than ppo.response_length "
            f"({limit} tokens with EOS)"
        )
    if not pairs:
        raise BadInput(
            f"in all {len(fitting.rows)} pairs, the chosen response is longer than "
            f"ppo.response_length ({limit} tokens with EOS) and the rejected one is not: raise it"
        )
    return pairs
