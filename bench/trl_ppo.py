"""TRL 1.12.0's PPOTrainer on the models and prompts of a run, for bench/against_trl.sh, which makes its environment; JSON on stdout.

`fp32` is its default on a CPU, `bf16` has bfloat16 weights (its fastest setting, and an unsafe one: small steps are rounded away),
`lora` adapters on a float32 policy. No stop token, so that every response has its full length.
"""

import argparse
import itertools
import json
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

ROUND = Path("rounds/r0")


class Times(TrainerCallback):
    """When training began and each update ended."""

    def __init__(self):
        self.at = []

    def on_train_begin(self, args, state, control, **_):
        self.at.append(time.perf_counter())

    def on_step_end(self, args, state, control, **_):
        self.at.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", choices=["fp32", "bf16", "lora"])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--response-length", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.setting == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(ROUND / "sft/model", padding_side="left")

    def causal():
        return AutoModelForCausalLM.from_pretrained(ROUND / "sft/model", dtype=dtype)

    def scorer():
        return AutoModelForSequenceClassification.from_pretrained(ROUND / "reward/model", num_labels=1, dtype=dtype)

    lines = (ROUND / "prepare/data/prompts_train.jsonl").read_text().splitlines()
    prompts = Dataset.from_list([{"input_ids": tokenizer(json.loads(line)["prompt"]).input_ids} for line in lines])
    times = Times()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if options.setting == "lora" else None
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=".rondo/trl_ppo",
            per_device_train_batch_size=options.episodes,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            local_rollout_forward_batch_size=options.episodes,
            total_episodes=options.episodes * options.updates,
            num_ppo_epochs=options.epochs,
            response_length=options.response_length,
            temperature=1.0,
            num_sample_generations=0,
            learning_rate=3e-6,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
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
    stdout, sys.stdout = sys.stdout, sys.stderr
    trainer.train()
    sys.stdout = stdout
    updates = [round(end - start, 2) for start, end in itertools.pairwise(times.at)]
    print(json.dumps({"updates": updates[1:], "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
