"""Measures TRL 1.12.0's PPOTrainer on the models and prompts of a run, and prints JSON.

docs/bench/against_trl.sh runs it in an environment of its own. Settings:

- `fp32`: TRL's default on a CPU.
- `lora`: the same with adapters on the policy.
- `autocast`: policy and critic train with bfloat16 products; generation, reference and reward model
  stay in float32. On a CPU only the environment variable switches it on; `bf16=True` does nothing.
- `bf16`: bfloat16 weights, which is unsafe, because small steps are rounded away.
- `bf16-lora`: the same with float32 adapters on the policy; the critic trains all weights.

Without `--every` it reports the seconds per update, and all responses have their full length. With
`--every` it reports the curve of docs/bench/curve.py: responses end at EOS, and settings that both
trainers have are those of params.yaml. Scores are in standard deviations.
"""

import argparse
import itertools
import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from curve import REWARD, SFT, Curve, episodes
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from stages.lib.core.params import Params, load_params
from stages.lib.core.params.policy import PpoParams
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.responses import sample_responses
from stages.ppo.common.episodes import Episode
from stages.ppo.common.policy_selection import PolicySelector


class Times(TrainerCallback):
    """Records the times at which training began and each update ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at.append(time.perf_counter())


class Points(TrainerCallback):
    """Adds a point to the curve before training, and after every `every` updates."""

    def __init__(self, curve: Curve, every: int) -> None:
        self.curve, self.every, self.updates = curve, every, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.curve.point(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updates += 1
        if self.updates % self.every == 0:
            self.curve.point(self.updates)


def curve_of(
    trainer: PPOTrainer, reference: Any, tokenizer: Any, held_out: list[Episode], params: Params
) -> Curve:
    """A `Curve` of TRL's policy, with the attributes of `Roles` that PolicySelector uses."""
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    roles: Any = SimpleNamespace(
        policy=policy,
        tokenizer=tokenizer,
        reference=lambda: nullcontext(reference),
        sample=lambda ids, ppo, generator: sample_responses(
            policy,
            tokenizer,
            ids,
            generator,
            response_length=ppo.response_length,
            temperature=ppo.temperature,
        ),
    )
    # not load_primary_judge: the environment of TRL's PPO lacks the libraries of other judges
    judge = PrimaryJudge("lexicon", LexiconJudge(params.evaluate.tie_margin))
    return Curve(PolicySelector(roles, held_out, judge, params.ppo, params.seed).measure)


def config_of(options: argparse.Namespace, ppo: PpoParams) -> PPOConfig:
    """TRL's config with the PPO settings of params.yaml."""
    ending = {"stop_token": "eos", "missing_eos_penalty": ppo.missing_eos_penalty}
    return PPOConfig(
        output_dir=".rondo/trl_ppo",
        per_device_train_batch_size=options.episodes,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=options.episodes,
        total_episodes=options.episodes * options.updates,
        num_ppo_epochs=options.epochs,
        response_length=options.response_length,
        temperature=ppo.temperature,
        kl_coef=ppo.kl_coef,
        gamma=ppo.gamma,
        lam=ppo.lam,
        cliprange=ppo.cliprange,
        cliprange_value=ppo.cliprange_value,
        vf_coef=ppo.vf_coef,
        num_sample_generations=0,
        learning_rate=options.learning_rate,
        seed=options.seed,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(ending if options.every else {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", choices=["fp32", "lora", "autocast", "bf16", "bf16-lora"])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--response-length", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--every", type=int, default=0, help="updates between measurements")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params = load_params(Path("params.yaml")).model_copy(update={"seed": options.seed})
    ppo = params.ppo
    torch.manual_seed(params.seed)
    mixed = options.setting in ("autocast", "bf16-lora")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if mixed else "no"
    dtype = torch.bfloat16 if options.setting.startswith("bf16") else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(SFT, padding_side="left")
    train, held_out = episodes(params, tokenizer)

    def causal() -> Any:
        return AutoModelForCausalLM.from_pretrained(SFT, dtype=dtype)

    def scorer() -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(
            REWARD, num_labels=1, dtype=dtype
        )
        model.score.weight.data /= model.config.std  # scores in standard deviations
        return model

    adapters = LoraConfig(
        r=ppo.lora.r,
        lora_alpha=ppo.lora.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    lora = adapters if options.setting.endswith("lora") else None
    prompts = Dataset.from_list([{"input_ids": tokens} for _, tokens in train])
    times = Times()
    trainer = PPOTrainer(
        args=config_of(options, ppo),
        processing_class=tokenizer,
        model=causal(),
        ref_model=None if lora else causal(),
        reward_model=scorer(),
        value_model=scorer(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(options.episodes)),
        peft_config=lora,
        callbacks=[times],
    )
    if options.gradient_checkpointing:  # TRL's PPOTrainer does not read the key of its config
        model = trainer.accelerator.unwrap_model(trainer.model)
        for trained in (model.policy, model.value_model):
            trained.gradient_checkpointing_enable({"use_reentrant": False})
        model.is_gradient_checkpointing = True  # so that TRL switches it off to generate
    if options.every:
        reference = causal().to(trainer.accelerator.device)
        curve = curve_of(trainer, reference, tokenizer, held_out, params)
        trainer.add_callback(Points(curve, options.every))
    stdout, sys.stdout = sys.stdout, sys.stderr  # TRL prints its metrics; stdout is for JSON
    trainer.train()
    sys.stdout = stdout
    if options.every:
        print(json.dumps(curve.points))
    else:
        updates = [round(end - start, 2) for start, end in itertools.pairwise(times.at)]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"updates": updates[1:], "peak_memory_mib": memory}))


if __name__ == "__main__":
    main()
