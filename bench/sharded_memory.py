"""Measures the peak memory and the time of PPO with all weights in two processes on a CPU, which
hold whole models (`launcher.processes: 2`) or divide their layers (`launcher.shard: true`).

    python -m bench.sharded_memory

The models are random ones of 63 million weights in float32, of which 57 million are in layers. Each
line is one kind: per process, MiB of resident memory at its peak while the models are loaded, and
in the later of two updates; and seconds of that update. `heap` kept: with the settings of a run,
which keep freed memory in the process; returned: glibc returns each freed tensor.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.execution.dvc_stages import MALLOC
from stages.lib.core.launch import end_with_agent, launch
from stages.lib.core.ram import peak_bytes

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "grouped",
}
SETTINGS = {"batch_size": 4, "mini_batch_size": 4, "micro_batch_size": 1, "response_length": 16}
SETTINGS |= {"num_ppo_epochs": 1}
PROCESSES = 2
HEAPS = {"kept": MALLOC, "returned": "glibc.malloc.mmap_threshold=1048576"}


class Numbers:
    """The part of a tokenizer that the trainer uses; a token's text is its number."""

    eos_token_id, pad_token_id = 2, 0

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def peak_mib() -> int:
    """The peak since the last call."""
    peak = peak_bytes() >> 20
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    return peak


def make_roles(sharded: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
    from stages.ppo.trainer.roles import Roles

    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    reward = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)).eval()
    reward.config.mean, reward.config.std = 0.0, 1.0
    tokenizer: Any = Numbers()
    return Roles(policy=policy, critic=reward, tokenizer=tokenizer, sharded=sharded)


def measure(heap: str, sharded: bool) -> None:
    """What each process does; the main one prints."""
    from stages.lib.core.params.policy import PpoParams
    from stages.lib.lm import world
    from stages.ppo.trainer.update import PpoTrainer

    end_with_agent()
    world.join()
    roles = make_roles(sharded)
    loading = peak_mib()
    prompts: Any = [({"id": str(i), "prompt": str(i)}, [5 + i, 6]) for i in range(8)]
    trainer = PpoTrainer(roles, prompts, PpoParams(**SETTINGS), seed=0)
    trainer.step()
    peak_mib()
    start = time.monotonic()
    trainer.step()
    seconds = round(time.monotonic() - start, 1)
    peaks = world.gather([{"loading": loading, "update": peak_mib()}])
    if world.is_main():
        result = {"heap": heap, "shard": sharded, "mib": peaks, "seconds": seconds}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if "--of-agent" in sys.argv:
        measure(sys.argv[2], "--shard" in sys.argv)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        for heap, settings in HEAPS.items():
            os.environ["GLIBC_TUNABLES"] = settings  # for the processes
            for kind in ([], ["--shard"]):
                launch("bench.sharded_memory", ["--of-agent", heap, *kind], PROCESSES)
