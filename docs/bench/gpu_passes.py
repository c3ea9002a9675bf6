"""Times single passes of a model of SmolLM2-135M's shape on a GPU, against the launch of a kernel.

`python docs/bench/gpu_passes.py` prints JSON: milliseconds, medians of five. A batch has 32 texts
of 32 tokens; sampling is that of 32 responses of 24 tokens, per token. If a pass takes as long as
its launches, the GPU waits for the processor, and a larger model or batch costs no more time.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_texts import random_texts
from transformers import LlamaConfig, LlamaForCausalLM

from stages.assets.base_model import save, tiny_tokenizer
from stages.lib.core.params import Params
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import generate
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.lora import add_adapters

SMOLLM2 = {  # config.json of SmolLM2-135M
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ROWS, TOKENS, PROMPT, RESPONSE = 32, 32, 8, 24


def milliseconds(run: Callable[[], Any], times: int = 1) -> float:
    run()
    measured = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        measured.append((time.perf_counter() - start) / times * 1000)
    return round(median(measured), 4)


def main() -> None:
    params = Params()
    setup_torch(params)
    number = torch.ones(1, device="cuda")
    results = {"launch": milliseconds(lambda: number.add_(1), 5000)}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save(LlamaForCausalLM(LlamaConfig(**SMOLLM2)), tiny_tokenizer(), folder, "none")
        model, tokenizer = load_causal_lm(folder, params.model), load_tokenizer(folder)
    ids = torch.tensor(random_texts(ROWS, TOKENS, len(tokenizer)), device="cuda")
    with torch.no_grad():
        results["forward"] = milliseconds(lambda: model(ids))
    policy = add_adapters(model, params.ppo.lora, "CAUSAL_LM")
    with torch.no_grad():
        results["forward with adapters"] = milliseconds(lambda: policy(ids))
    results["forward and backward"] = milliseconds(
        lambda: policy(ids).logits.float().logsumexp(-1).mean().backward()
    )
    prompts = random_texts(ROWS, PROMPT, len(tokenizer))
    sampled = milliseconds(
        lambda: generate(
            policy.eval(),
            prompts,
            response_length=RESPONSE,
            temperature=1.0,
            generator=torch.Generator().manual_seed(0),
            ends=end_tokens(policy, tokenizer),
        )
    )
    results["sampling, per token"] = round(sampled / RESPONSE, 4)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "milliseconds": results}, indent=2))


if __name__ == "__main__":
    main()
