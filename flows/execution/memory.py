"""The memory of each stage by the roles of its models: weights, gradients and Adam's states.

- A weight takes 4 bytes in float32, else 2. `model.dtype: auto` counts as bfloat16.
- A trained weight, of an adapter or of the whole model, is float32 with a gradient and Adam's two
  moments: 16 bytes (Rajbhandari et al. 2020, section 3.1). They are beside the weights that the
  passes compute with.
- An engine divides all of them among all GPUs; its 16 bytes include the weights of the passes.

A stage is refused only if these alone do not fit. For `rondo plan`, the activations of a training
step on a GPU come on top: what the backward pass reads of each trained layer, for texts as long as
the params admit; with gradient checkpointing one state per token and layer, and one layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from flows.execution.model_shape import ModelShape, read_shape
from stages.lib.core.errors import OutOfMemory
from stages.lib.core.hub import is_of_hub
from stages.lib.core.params import Params
from stages.lib.core.params.data import START
from stages.lib.core.params.evaluation import FLUENCY, HELD_OUT_REWARD_MODEL, ZERO_SHOT
from stages.lib.core.params.judging import Annotator
from stages.lib.core.params.policy import Algorithm, Critic, Engine, PpoParams
from stages.lib.core.params.shared import Dtype, LoraParams, TrainParams

TRAINED_BYTES = 16  # per trained weight: weight, gradient, two moments, in float32
FLOAT = 4
CACHE = 0.25  # of a GPU: keys and values while a stage samples, at most: GPU_CACHE_SHARE
SMALLER = (
    "choose a smaller assets.model or a machine with more memory, lower reward.ensemble, or train "
    "adapters (lora.r above 0) instead of all weights"
)
LOGIT_BYTES = 10  # of an engine: logits and their gradient in float32, and one of them in bfloat16


@dataclass(frozen=True)
class Role:
    """Models of a stage with one purpose. weights: of all of them. trained: those weights, or those
    of adapters, that are trained.
    """

    name: str
    weights: float
    trained: float = 0.0

    def of_one_process(self, share: float) -> "Role":
        """The part of the role that a process holds."""
        return Role(self.name, self.weights * share, self.trained * share)

    def bytes(self, per_weight: int) -> float:
        return self.weights * per_weight + self.trained * TRAINED_BYTES


def bytes_per_weight(params: Params) -> int:
    return FLOAT if params.model.dtype is Dtype.float32 else 2


def trained_weights(shape: ModelShape, lora: LoraParams) -> float:
    """Adapters; or all weights."""
    return float(shape.adapter_weights(lora) if lora.r else shape.weights)


def stage_roles(params: Params, shape: ModelShape) -> dict[str, list[Role]]:
    """The roles in each stage that runs models, as one process holds them."""
    one, reward, annotate = float(shape.weights), params.reward, params.annotate
    primary = Role("primary judge", judge_weights(shape, params.evaluate.judges[:1]))
    judges = Role("judges", judge_weights(shape, params.evaluate.judges))
    sft = Role("SFT model", one)
    # an adapter is on the SFT model
    policy = Role("policy and its SFT model", one if params.ppo.lora.r else 2 * one)
    members = Role("reward models", one * reward.ensemble)
    held_out = Role("held-out reward model", one if reward.judge_share else 0.0)
    # a later round is compared with the first round's SFT model, too
    continues = any(entry.previous != START for entry in params.rounds.values())
    stages = {
        "sft": [Role("SFT model", one, trained_weights(shape, params.sft.lora))],
        "reward": [
            Role("reward model", one, trained_weights(shape, reward.lora)),
            Role("reward models trained before it", one * (reward.ensemble - 1)),
            held_out,
        ],
        "battery": [sft, members, held_out, primary],
        "ppo": [*_ppo_roles(params, shape), primary],
        "evaluate": [
            Role("base and SFT models", one * (3 if continues else 2)),
            policy,
            members,
            judges,
        ],
        "capability": [sft, policy],
        "replay": [policy, members, judges],
    }
    if annotate.annotator is Annotator.judge or annotate.revisions:
        stages["annotate"] = [sft, primary]
    return stages


def _ppo_roles(params: Params, shape: ModelShape) -> list[Role]:
    """Policy, reference, critic and rewards, divided among the processes with `launcher.shard`. The
    policies that an engine trained are only sampled here.
    """
    one, ppo = float(shape.weights), params.ppo
    local = ppo.engine is Engine.local
    roles = [
        Role("policy", one, trained_weights(shape, ppo.lora) if local else 0.0),
        Role("reference", 0.0 if ppo.lora.r else one),
        Role("reward models", 0.0 if ppo.reward_url else one * params.reward.ensemble),
    ]
    if local and params.algorithm is Algorithm.ppo and ppo.critic is Critic.reward:
        frozen = 0.0 if ppo.critic_lora.r else one
        roles.append(Role("critic", frozen, trained_weights(shape, ppo.critic_lora)))
    share = 1.0
    if params.launcher.shard:
        share -= shape.layer_weights / shape.weights * (1 - 1 / params.processes("ppo"))
    further = judge_weights(shape, [source.model for source in ppo.rewards if source.model])
    return [*(role.of_one_process(share) for role in roles), Role("further rewards", further)]


def judge_weights(shape: ModelShape, named: Iterable[str]) -> float:
    """Weights of those judges or rewards that are models."""
    weights = 0
    for name in {FLUENCY if name == ZERO_SHOT else name for name in named}:  # they share a model
        if name in (FLUENCY, HELD_OUT_REWARD_MODEL):
            weights += shape.weights
        elif (Path(name).is_dir() or is_of_hub(name)) and (other := read_shape(name)):
            weights += other.weights
    return float(weights)


def check(
    params: Params, stages: Iterable[str], shape: ModelShape, memory: float, gpu: bool
) -> dict[str, float]:
    """Check that weights and states of `stages`, which would run here, fit; returns their bytes.

    Args:
        memory: bytes of one GPU, or of RAM, which all processes of a stage share.
        gpu: whether it is that of a GPU.

    Raises:
        OutOfMemory: a stage needs more.
    """
    roles, per_weight, needed = stage_roles(params, shape), bytes_per_weight(params), {}
    for stage in stages:
        if stage not in roles:
            continue
        processes = 1 if gpu else params.processes(stage)
        sizes = {role.name: processes * role.bytes(per_weight) for role in roles[stage]}
        needed[stage] = sum(sizes.values())
        if needed[stage] > memory:
            parts = ", ".join(
                f"{name} {decimal(int(size))}" for name, size in sizes.items() if size
            )
            place = "a GPU of this machine" if gpu else "this machine"
            raise OutOfMemory(
                f"{stage} needs {decimal(int(needed[stage]))} of memory for weights, gradients and "
                f"Adam's states alone ({parts}), and {place} has {decimal(int(memory))}: "
                f"{SMALLER} (docs/running.md, Memory)"
            )
    return needed


class Need(NamedTuple):
    """Bytes of one GPU. peak: of activations in training, or of keys and values in sampling."""

    weights: float
    states: float
    peak: float


def gpu_needs(params: Params, shape: ModelShape, gpu: float, gpus: int) -> dict[str, Need]:
    """The memory that each stage needs of a GPU with `gpu` bytes, at most; and PPO by an engine, of
    each of `gpus` GPUs.
    """
    steps, needed = training_steps(params, shape), {}
    for stage, roles in stage_roles(params, shape).items():
        sampling = 0.0 if stage == "reward" else CACHE * gpu
        needed[stage] = Need(
            sum(role.weights for role in roles) * bytes_per_weight(params),
            sum(role.trained for role in roles) * TRAINED_BYTES,
            max(sampling, steps.get(stage, 0.0)),
        )
    if params.ppo.engine is not Engine.local:
        needed[f"ppo by {params.ppo.engine.value}"] = engine_need(
            params, shape, gpus, params.ppo.micro_batch_size
        )
    return needed


def training_steps(params: Params, shape: ModelShape) -> dict[str, float]:
    """Bytes of a training step's activations by stage."""
    sft, reward, ppo = params.sft, params.reward, params.ppo
    steps: dict[str, tuple[int, TrainParams | PpoParams]] = {
        "sft": (sft.per_device_train_batch_size * sft.max_length, sft),
        "reward": (2 * reward.per_device_train_batch_size * reward.max_length, reward),
    }
    if ppo.engine is Engine.local:
        steps["ppo"] = ppo.micro_batch_size * episode_tokens(params), ppo
    number = bytes_per_weight(params)
    sizes = {
        stage: activations(shape, tokens, number, section.lora, section.gradient_checkpointing)
        for stage, (tokens, section) in steps.items()
    }
    if "ppo" in steps and ppo.lora.r:  # the states below the adapters, of all episodes
        below = ppo.batch_size * episode_tokens(params) * shape.hidden * number
        sizes["ppo"] += below * (1 + (ppo.critic is Critic.reward))
    return sizes


def episode_tokens(params: Params) -> int:
    return params.prepare.max_prompt_tokens + params.ppo.response_length


def engine_need(params: Params, shape: ModelShape, gpus: int, episodes: int) -> Need:
    """Of PPO by an engine on one of `gpus` GPUs, with so many episodes at once: the model whose
    turn it is while the others wait in RAM; activations, logits, and two gathered layers.
    """
    tokens = episodes * episode_tokens(params)
    gathered = 2 * max(shape.layer_weights // shape.layers, shape.embedding_weights) * 2
    step = activations(shape, tokens, 2, LoraParams(r=0), params.ppo.gradient_checkpointing)
    states = shape.weights * TRAINED_BYTES / gpus
    return Need(0.0, states, gathered + step + tokens * shape.vocabulary * LOGIT_BYTES)


def activations(
    shape: ModelShape, tokens: int, number: int, lora: LoraParams, checkpointing: bool
) -> float:
    """What the backward pass of `tokens` tokens reads, and the gradients of one layer; number:
    bytes of one.
    """
    layer = float(tokens * kept_per_token(shape, number, full=lora.r == 0))
    if checkpointing:
        return tokens * shape.trained_layers(lora) * shape.hidden * number + 2 * layer
    return (shape.trained_layers(lora) + 1) * layer


def kept_per_token(shape: ModelShape, number: int, full: bool) -> int:
    """Bytes that one layer keeps per token for the backward pass.

    The input of two norms in float32 and their results; queries, keys and values before and after
    their rotation; the result of attention; input, gate and product of the MLP. All weights trained
    (`full`): also the norms' results before their weights, in float32.
    """
    queries, keys = shape.heads * shape.head_size, shape.key_heads * shape.head_size
    norms = shape.hidden * 2 * (FLOAT * (2 if full else 1) + number)
    attention = 2 * (queries + 2 * keys) + queries
    return norms + (attention + (4 if shape.gated else 2) * shape.inner) * number
