"""What verl loads from the job's folder: rewards, and the policies that it would delete.

A copy is there, with the numbers in a JSON file beside it. It runs in verl's environment, so that
no part of Rondo is imported. What fails raises, and so ends the job.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import aiohttp
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

POLICIES = Path(__file__).with_name("policies")
NUMBERS = json.loads(Path(__file__).with_suffix(".json").read_text())
TRIES = 4
SECONDS = 600.0  # for an answer


class RondoReward(RewardManagerBase):
    """The score of the round's reward model, which verl serves by vLLM.

    vLLM gets the tokens that were sampled, with EOS at their end, where verl's own code would send
    a text in the chat template of the tokenizer.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.url = f"http://{reward_router_address}/classify"

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of one episode: prompt and response are padded apart."""
        batch = data[0].batch
        width = batch["prompts"].shape[-1]
        mask = batch["attention_mask"].bool()
        prompt = batch["prompts"][mask[:width]].tolist()
        response = batch["responses"][mask[width:]].tolist()
        score = shaped(await self.raw_score(prompt + closed(response)), response)
        return {"reward_score": score, "reward_extra_info": {}}

    async def raw_score(self, tokens: list[int]) -> float:
        """The output of the reward model.

        Raises:
            RuntimeError: there is no answer, or none with a score.
        """
        body = {"model": NUMBERS["model"], "input": [tokens], "use_activation": False}
        failure = ""
        for attempt in range(TRIES):
            await asyncio.sleep(2**attempt - 1)
            try:
                timeout = aiohttp.ClientTimeout(total=SECONDS)
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    session.post(self.url, json=body) as response,
                ):
                    if response.status == 200:
                        return float((await response.json())["data"][-1]["probs"][-1])
                    failure = f"{response.status}: {(await response.text())[:500]}"
            # on Python 3.10, which verl supports, asyncio has a TimeoutError of its own
            except (aiohttp.ClientConnectionError, asyncio.TimeoutError) as error:  # noqa: UP041
                failure = repr(error)
        raise RuntimeError(f"the reward model at {self.url} has no score for a response: {failure}")


def closed(response: list[int]) -> list[int]:
    """The response with EOS at its end, where reward models are read: in place of another end
    token, or appended if it was cut off.
    """
    return [*(response[:-1] if ended(response) else response), NUMBERS["ends"][0]]


def ended(response: list[int]) -> bool:
    return bool(response) and response[-1] in NUMBERS["ends"]


def shaped(raw: float, response: list[int]) -> float:
    """The calibrated score as PPO gets it: clipped, then less the penalties (docs/ppo.md)."""
    score = (raw - NUMBERS["mean"]) / NUMBERS["std"]
    score = max(-NUMBERS["clip"], min(score, NUMBERS["clip"]))
    if not ended(response):
        score -= NUMBERS["missing_eos_penalty"]
    return score - NUMBERS["length_penalty"] * max(len(response) - NUMBERS["free_length"], 0)


class KeepPolicies(CheckpointCallback):
    """Called after each checkpoint, of which verl keeps the last two: keeps the policies of all, by
    hard links. The one before is looked for, too: verl may have been killed before this call.
    """

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        for folder in Path(checkpoint_dir).parent.glob("global_step_*"):
            policy, saved = POLICIES / folder.name, folder / "actor/huggingface"
            if saved.exists() and not policy.exists():
                part = policy.with_name(f"part-{policy.name}")
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(saved, part, copy_function=link)
                part.rename(policy)


def link(source: str, target: str) -> None:
    """Hard link, or copy, if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compute_score(*_: Any, **__: Any) -> float:
    """Named in verl's config so that it calls RondoReward, which needs no such function.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("rewards are made by RondoReward")
