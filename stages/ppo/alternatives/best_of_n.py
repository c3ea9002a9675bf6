"""Best-of-n, learnt (RAFT, Dong et al. 2023; best-of-n as in Gao et al. 2023): SFT on the best
rewarded of n responses to each prompt.
"""

from typing import NamedTuple

import torch

from stages.lib.core.params.shared import TrainParams
from stages.lib.core.types import Row, TokenIds
from stages.lib.lm.lora import add_adapters
from stages.lib.training.completion_only import train_on_completions
from stages.lib.training.trl_setup import trainer_arguments
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.policy import TrainedPolicy, TrainingContext


class BestOfN(NamedTuple):
    """The best rewarded response to each prompt, and the rows of all n."""

    prompts: list[TokenIds]
    responses: list[TokenIds]
    rows: list[Row]


def train(setting: TrainingContext) -> PolicyCallback:
    params = setting.params
    model = add_adapters(setting.sft, params.ppo.lora, "CAUSAL_LM")
    course = PolicyCallback(
        setting, {name: name for name in ("loss", "grad_norm", "learning_rate")}
    )
    course.begin(model)
    choice = choose(course.pupil, setting)
    course.rollouts.append(choice.rows)
    sizes = TrainParams(
        **params.best_of_n.model_dump(exclude={"n"}),
        max_steps=params.ppo.max_steps,
        max_length=params.prepare.max_prompt_tokens + params.ppo.response_length,
    )
    arguments = trainer_arguments(sizes, params.model, params.seed, setting.work, continues=False)
    train_on_completions(
        model, setting.tokenizer, (choice.prompts, choice.responses), arguments, course
    )
    return course


def choose(pupil: TrainedPolicy, setting: TrainingContext) -> BestOfN:
    """By a policy that is still SFT. A response that has not ended is learnt without EOS, as it was
    sampled.
    """
    n = setting.params.best_of_n.n
    episodes = [episode for episode in setting.prompts for _ in range(n)]
    generator = torch.Generator().manual_seed(setting.params.seed)
    responses = pupil.sample([tokens for _, tokens in episodes], setting.params.ppo, generator)
    rows, rewards = pupil.score(0, episodes, responses)
    best = [
        max(range(start, start + n), key=lambda place: rewards[place])
        for start in range(0, len(episodes), n)
    ]
    return BestOfN(
        [episodes[place][1] for place in best], [responses[place] for place in best], rows
    )
