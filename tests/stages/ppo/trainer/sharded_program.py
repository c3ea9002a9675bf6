"""What each of two processes does in test_sharded_optimizer.py; the main one saves the results to
the file of the first argument.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from stages.lib.core.launch import end_with_agent
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.loading import attach_ensemble
from stages.lib.lm.saving import trainable_state_dict, weights_hash
from stages.lib.lm.world import local
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.trainer.roles import Roles, ValueHead
from stages.ppo.trainer.update import PpoTrainer
from tests.conftest import TINY
from tests.stages.ppo.conftest import ByteTokenizer

# no number of rows is even: 16 and 15 rows of the MLP, 21 and 20 of the vocabulary
SHAPE = TINY | {"intermediate_size": 31, "vocab_size": 41, "initializer_range": 0.2}
SETTINGS = {"batch_size": 6, "mini_batch_size": 3, "micro_batch_size": 1, "num_ppo_epochs": 2}
SETTINGS |= {"response_length": 6, "learning_rate": 1e-2, "critic_learning_rate": 1e-2}
# a norm that is far above max_grad_norm in every step, and far below it
CASES: dict[str, dict[str, Any]] = {
    "critic": {"max_grad_norm": 0.01, "entropy_coef": 0.01},
    "value head": {"max_grad_norm": 100.0, "loss_level": "sequence", "cliprange_sequence": 0.2},
    "bfloat16": {"learning_rate": 1e-3, "lam": 0.95},
}


def reward_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)).eval()
    model.config.mean, model.config.std, model.config.ensemble_reduce = 0.0, 1.0, "mean"
    model.config.ensemble_mean, model.config.ensemble_std = 0.0, 1.0
    return model


def make_roles(case: str, sharded: bool) -> Roles:
    torch.manual_seed(0)
    tied = LlamaConfig(**SHAPE, tie_word_embeddings=case != "value head")
    policy, reward = LlamaForCausalLM(tied).eval(), reward_model(1)
    if case == "critic":
        attach_ensemble(reward, [reward_model(2)])
    if case == "bfloat16":
        policy.to(torch.bfloat16)
    has_head = case == "value head"
    return Roles(
        policy=policy,
        critic=ValueHead(SHAPE["hidden_size"]) if has_head else reward,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        reward_model=reward if has_head else None,
        gradient_checkpointing=case == "critic",
        sharded=sharded,
    )


def train(case: str, sharded: bool) -> dict[str, Any]:
    """Two updates; one in bfloat16, after which tokens differ.

    Returns:
        Hashes of the reference before and after, metrics, responses, the optimizers' states,
        the rows that each process holds, and what `select` gives.
    """
    roles = make_roles(case, sharded)
    prompts: Any = [({"id": str(i), "prompt": str(i)}, [5 + i, 6]) for i in range(20)]
    trainer = PpoTrainer(roles, prompts, PpoParams(**(SETTINGS | CASES[case])), seed=0)
    with roles.reference() as reference:
        before = weights_hash(reference)
    steps = [trainer.step() for _ in range(1 if case == "bfloat16" else 2)]
    with roles.reference() as reference:
        after = weights_hash(reference)
    return {
        "hashes": [before, after],
        "metrics": [metrics for _, metrics in steps],
        "responses": [[r.tokens for r in rollout.responses] for rollout, _ in steps],
        "state": trainer.state()["optimizers"],
        "rows": world.gather([rows_per_weight(trainer)]),
        **select(trainer),
    }


def select(trainer: PpoTrainer) -> dict[str, Any]:
    """The policy's weights in a selector's state, and whether each process gets its own from it."""
    judge: Any = None  # the state does not depend on it
    policy = trainer.roles.policy
    own = {name: weight.clone() for name, weight in trainable_state_dict(policy).items()}
    selector = PolicySelector(trainer.roles, [], judge, trainer.params, 0, weights=own)
    [state, *_] = world.gather([selector.state()])  # as the main process saves it
    resumed = PolicySelector(trainer.roles, [], judge, trainer.params, 0)
    resumed.load_state(state)
    equal = all(torch.equal(resumed.weights[name], weight) for name, weight in own.items())
    return {"selected": state["weights"], "resumed": world.gather([equal])}


def rows_per_weight(trainer: PpoTrainer) -> list[StateDict]:
    """Of policy and critic: rows that this process holds, by weight."""
    return [
        {
            name: {
                "weight": len(local(weight)),
                **{
                    key: len(value)
                    for key, value in optimizer.optimizer.state[optimizer.masters[name]].items()
                    if value.dim()
                },
                "master": len(optimizer.masters[name]),
            }
            for name, weight in optimizer.weights.items()
        }
        for optimizer in trainer.optimizers.values()
    ]


def main() -> None:
    end_with_agent()
    world.join()
    results = {case: [train(case, sharded) for sharded in (False, True)] for case in CASES}
    if world.is_main():
        torch.save(results, Path(sys.argv[1]))


main()
