"""TRL 1.12.0's PPOTrainer on the models and prompts of a run, for bench/against_trl.sh, which makes
its environment; JSON on stdout.

`fp32` is its default on a CPU, `lora` the same with adapters on the policy, `autocast` trains
policy and critic with bfloat16 products (on a CPU by environment variable alone: `bf16=True` does
nothing; generation, reference and reward model stay in float32), `bf16` has bfloat16 weights, which
is unsafe: small steps are rounded away. Without `--every`: seconds of updates whose responses have
their full length. With it: the curve of bench/curve.py; responses end at EOS, scores are in
standard deviations, and what both trainers know is as in params.yaml.
"""

import argparse
import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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

from stages.lib.core.params import load_params
from stages.lib.lm.generation import sample_responses
from stages.lib.metrics.sentiment import sentiment
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.reference import FrozenModel


class Times(TrainerCallback):
    """When training began and each update ended."""

    def __init__(self):
        self.at = []

    def on_train_begin(self, args, state, control, **_):
        self.at.append(time.perf_counter())

    def on_step_end(self, args, state, control, **_):
        self.at.append(time.perf_counter())


class Points(TrainerCallback):
    """A point of the curve before training, and after every `every` updates."""

    def __init__(self, curve, every):
        self.curve, self.every, self.updates = curve, every, 0

    def on_train_begin(self, args, state, control, **_):
        self.curve.point(0)

    def on_step_end(self, args, state, control, **_):
        self.updates += 1
        if self.updates % self.every == 0:
            self.curve.point(self.updates)


def curve_of(trainer, reference, tokenizer, held_out, params):
    """Measured by what measures our own policies, which asks this much of its roles."""
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    roles = SimpleNamespace(
        policy=policy,
        tokenizer=tokenizer,
        reference=FrozenModel(reference).reference,
        sample=lambda ids, ppo, generator: sample_responses(
            policy, tokenizer, ids, ppo, generator, len(ids)
        ),
    )
    return Curve(PolicySelector(roles, held_out, sentiment, params.ppo, params.seed).measure)


def config_of(options, ppo):
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
        **(
            {"stop_token": "eos", "missing_eos_penalty": ppo.missing_eos_penalty}
            if options.every
            else {}
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", choices=["fp32", "lora", "autocast", "bf16"])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--response-length", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params = load_params(Path("params.yaml")).model_copy(update={"seed": options.seed})
    ppo = params.ppo
    torch.manual_seed(params.seed)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if options.setting == "autocast" else "no"
    dtype = torch.bfloat16 if options.setting == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(SFT, padding_side="left")
    train, held_out = episodes(params, tokenizer)

    def causal():
        return AutoModelForCausalLM.from_pretrained(SFT, dtype=dtype)

    def scorer():
        model = AutoModelForSequenceClassification.from_pretrained(
            REWARD, num_labels=1, dtype=dtype
        )
        model.score.weight.data /= model.config.std
        return model

    adapters = LoraConfig(
        r=ppo.lora.r,
        lora_alpha=ppo.lora.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    lora = adapters if options.setting == "lora" else None
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
    if options.every:
        reference = causal().to(trainer.accelerator.device)
        curve = curve_of(trainer, reference, tokenizer, held_out, params)
        trainer.add_callback(Points(curve, options.every))
    stdout, sys.stdout = sys.stdout, sys.stderr
    trainer.train()
    sys.stdout = stdout
    if options.every:
        print(json.dumps(curve.points))
    else:
        updates = [round(end - start, 2) for start, end in itertools.pairwise(times.at)]
        print(
            json.dumps(
                {
                    "updates": updates[1:],
                    "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                }
            )
        )


if __name__ == "__main__":
    main()
