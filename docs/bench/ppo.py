"""Measures seconds, tokens and memory of PPO updates, and the least time for their matrix products.

`python docs/bench/ppo.py --episodes 32 --updates 6 --set ppo.num_ppo_epochs=4` after `make run`
uses the models of round r0 and prints JSON. EOS is replaced by a token that is never sampled, so
that every response has its full length. The first update is a warm-up and is left out.
"""

import argparse
import json
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from curve import REWARD, SFT, episodes

from flows.core.config import resolve
from stages.lib.core.params import Params
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.loading import resolve_dtype, setup_torch
from stages.lib.lm.packing import unwrap_peft
from stages.ppo.trainer.roles import Roles, load_roles
from stages.ppo.trainer.update import PpoTrainer

NEVER_SAMPLED = "<jupyter_start>"  # a token of SmolLM2 that does not occur in ordinary text
Timed = Callable[..., Any]


class Clock:
    """Seconds of the current update by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, phase: str, function: Timed) -> Timed:
        """`function`, whose time is added to a phase."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] += time.perf_counter() - start

        return wrapper


def flops(params: Params, roles: Roles, episodes: int, prompt: float) -> float:
    """The least FLOPs of one update: its matrix products with weights.

    Those of adapters and of attention are left out. Per weight and token: 2 forward; backward 2 to
    pass the gradient on, and 2 more if the weight is trained itself (r 0). Layers that all roles
    share run once.

    Args:
        prompt: mean length of a prompt in tokens.
    """
    ppo, model = params.ppo, unwrap_peft(roles.policy)
    config = model.config
    layers, response = config.num_hidden_layers, ppo.response_length
    length = prompt + response
    head = config.vocab_size * config.hidden_size
    trunk = sum(
        weight.numel()
        for name, weight in model.base_model.layers.named_parameters()
        if "lora" not in name
    )
    generate = 2 * (trunk * length + head * response)
    # reference and reward model
    frozen = 2 * (2 - roles.num_shared_layers / layers) * trunk * length + 2 * head * response

    def learning(lora: LoraParams) -> float:
        upper = min((lora.top_layers or layers) / layers, 1.0) if lora.r else 1.0
        return (4 if lora.r else 6) * trunk * length * upper

    heads = (4 if ppo.lora.r else 6) * head * response
    epoch = learning(ppo.lora) + learning(ppo.critic_lora) + heads
    return episodes * (generate + frozen + ppo.num_ppo_epochs * epoch)


def matmul_rate(dtype: torch.dtype, size: int = 768, least_seconds: float = 0.3) -> float:
    """FLOP/s of products of two matrices on this machine's CPU."""
    matrix, products = torch.ones(size, size, dtype=dtype), 0
    (matrix @ matrix).sum().item()  # warms up
    start = time.perf_counter()
    while time.perf_counter() - start < least_seconds:
        (matrix @ matrix)[0, 0].item()
        products += 1
    return 2 * size**3 * products / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=32, help="responses per update")
    parser.add_argument("--updates", type=int, default=6, help="updates to run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    sizes = [f"ppo.{name}={options.episodes}" for name in ("batch_size", "mini_batch_size")]
    sizes.append(f"ppo.micro_batch_size={min(options.episodes, 32)}")
    params = resolve("keep", None, [*sizes, *options.set])
    setup_torch(params)
    rate = matmul_rate(resolve_dtype(params.model.dtype))
    roles = load_roles(params, SFT, REWARD)
    roles.tokenizer.eos_token = NEVER_SAMPLED
    unwrap_peft(roles.policy).generation_config.eos_token_id = None
    prompts, _ = episodes(params, roles.tokenizer)
    trainer, clock, updates = PpoTrainer(roles, prompts, params.ppo, params.seed), Clock(), []
    for phase, owner, name in (
        ("generate", roles, "sample"),
        ("score", roles, "forward"),
        ("learn", trainer, "optimize"),
    ):
        setattr(owner, name, clock.timed(phase, getattr(owner, name)))
    step, tokens = clock.timed("update", trainer.step), 0
    for _ in range(options.updates):
        clock.seconds.clear()
        rollout, _metrics = step()
        tokens = sum(map(len, rollout.prompts)) + sum(map(len, rollout.responses))
        updates.append(dict(clock.seconds))
    seconds = {phase: median(update[phase] for update in updates[1:]) for phase in updates[0]}
    mean_prompt = sum(len(prompt_tokens) for _, prompt_tokens in prompts) / len(prompts)
    floor = flops(params, roles, options.episodes, mean_prompt) / rate
    report = {
        "episodes": options.episodes,
        "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        "updates": [round(update["update"], 2) for update in updates[1:]],
        "tokens_per_second": round(tokens / seconds["update"], 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "matmul_gflops": round(rate / 1e9),
        "floor_seconds": round(floor, 2),
        "share_of_matmul_rate": round(floor / seconds["update"], 3),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
