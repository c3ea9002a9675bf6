"""A policy that Rondo did not train: DPO by TRL on an SFT model, as a user of TRL writes it.

    python docs/bench/foreign_dpo.py dpo         # after `make run`: writes the adapter to dpo/
    python docs/bench/foreign_dpo.py dpo 25      # 25 steps instead of an epoch
    rondo compare-models rounds/r0/sft/model dpo --reference rounds/r0/sft/model \\
        --prompts rounds/r0/prepare/data/eval_prompts.jsonl --judge lexicon --judge JUDGE

Nothing of Rondo is imported.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

SFT = "rounds/r0/sft/model"
PAIRS = "rounds/r0/annotate/data/pairs_train.jsonl"


def main(folder: str, steps: str = "-1") -> None:
    rows = load_dataset("json", data_files=PAIRS, split="train")
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(SFT, dtype="float32"),
        args=DPOConfig(
            output_dir=folder,
            learning_rate=2e-4,
            num_train_epochs=1,
            max_steps=int(steps),
            per_device_train_batch_size=16,
            max_length=96,
            beta=0.1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=rows.select_columns(["prompt", "chosen", "rejected"]),
        processing_class=AutoTokenizer.from_pretrained(SFT),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
