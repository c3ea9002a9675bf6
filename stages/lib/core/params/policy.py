"""What makes the policy, and the keys of each algorithm beside PPO's (docs/algorithms.md); names
are TRL's.
"""

from enum import Enum

from pydantic import Field, model_validator

from stages.lib.core.params.shared import LoraParams, ParamsSection


class Algorithm(str, Enum):
    ppo = "ppo"
    dpo = "dpo"
    rloo = "rloo"
    grpo = "grpo"
    best_of_n = "best_of_n"


class OfflineParams(ParamsSection):
    """Of a policy that learns from texts that are there before it starts."""

    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(
        16, ge=1, description="Pairs or texts an optimiser step."
    )
    num_train_epochs: float = Field(1.0, gt=0)


class DpoParams(OfflineParams):
    beta: float = Field(
        0.1,
        gt=0,
        description="How strongly the policy is held to SFT: the higher, the nearer it stays.",
    )


class BestOfNParams(OfflineParams):
    n: int = Field(
        8, ge=2, description="Responses of SFT a prompt; the one with the highest reward is learnt."
    )


class OnlineParams(ParamsSection):
    """Of a policy that learns from its own responses; sizes, lengths and learning rate are PPO's."""

    num_generations: int = Field(
        4,
        ge=2,
        description="Responses a prompt, measured against each other; divides ppo.batch_size.",
    )


class RlooParams(OnlineParams):
    beta: float = Field(
        0.11, ge=0, description="KL coefficient: what a nat a sequence takes from its reward."
    )


class GrpoParams(OnlineParams):
    beta: float = Field(
        0.11, ge=0, description="KL coefficient: what a nat a token (k3) adds to the loss."
    )


class OnDanger(str, Enum):
    stop = "stop"
    warn = "warn"


class KlControl(str, Enum):
    adaptive = "adaptive"
    proportional = "proportional"
    fixed = "fixed"


class LossLevel(str, Enum):
    token = "token"
    sequence = "sequence"


class VllmMode(str, Enum):
    colocate = "colocate"
    server = "server"


class Critic(str, Enum):
    reward = "reward"
    policy = "policy"


class RewardSource(ParamsSection):
    """One more opinion that PPO is rewarded by: exactly one of model, function, url."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", description="Its column in metrics and rollouts."
    )
    weight: float = Field(1.0, description="Its share of the score.")
    model: str | None = Field(
        None, description="Folder of a reward model; calibrated if its config has mean and std."
    )
    function: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="module:name of `reward(prompts, responses) -> list[float]`, importable from here.",
    )
    url: str | None = Field(None, description="A reward model over HTTP, by OpenRLHF's protocol.")

    @model_validator(mode="after")
    def one_kind(self) -> "RewardSource":
        if sum(kind is not None for kind in (self.model, self.function, self.url)) != 1:
            raise ValueError(f"reward {self.name}: give exactly one of model, function, url")
        return self


class PpoParams(ParamsSection):
    batch_size: int = Field(
        32, ge=2, description="Episodes a rollout (prompts sampled for one update)."
    )
    mini_batch_size: int = Field(
        32, ge=1, description="Episodes an optimiser step; divides batch_size."
    )
    micro_batch_size: int = Field(
        32,
        ge=1,
        description="Episodes a forward pass; divides mini_batch_size. Changes memory, not results.",
    )
    total_episodes: int = Field(640, ge=2, description="Episodes of the whole run.")
    max_steps: int | None = Field(None, ge=1, description="Updates at most (for smoke runs).")
    num_ppo_epochs: int = Field(3, ge=1)
    response_length: int = Field(24, ge=1, description="New tokens at most.")
    temperature: float = Field(1.0, gt=0)
    use_vllm: bool = Field(
        False,
        description="Rollouts by vLLM on a GPU (`pip install 'trl[vllm]'`; not measured yet).",
    )
    vllm_mode: VllmMode = Field(
        VllmMode.colocate,
        description="`colocate`: in the same GPU; `server`: one that `vllm serve` has started.",
    )
    vllm_server_base_url: str | None = Field(
        None, description="Of `server`, e.g. http://127.0.0.1:8000."
    )
    vllm_gpu_memory_utilization: float = Field(
        0.3, gt=0, lt=1, description="Share of the GPU's memory that `colocate` takes."
    )
    learning_rate: float = Field(5e-4, gt=0)
    critic_learning_rate: float = Field(5e-4, gt=0)
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rates rise.")
    max_grad_norm: float = Field(1.0, gt=0)
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    cliprange: float = Field(0.2, gt=0)
    loss_level: LossLevel = Field(
        LossLevel.token, description="Ratio and clip for each token, or for each sequence (GSPO)."
    )
    cliprange_value: float = Field(0.2, gt=0)
    vf_coef: float = Field(0.1, ge=0)
    entropy_coef: float = Field(0.0, ge=0)
    kl_coef: float = Field(0.11, ge=0, description="First KL coefficient (beta).")
    kl_control: KlControl = Field(
        KlControl.adaptive,
        description="`adaptive`: Ziegler et al. 2019; `proportional`: by the relative error; `fixed`: beta stays.",
    )
    target_kl: float = Field(6.5, gt=0, description="Nats a sequence.")
    kl_horizon: int = Field(
        64,
        ge=1,
        description="Episodes over which beta follows the target; short runs want a short one.",
    )
    max_kl: float = Field(
        7.5,
        gt=0,
        description="KL budget, nats a sequence; above it for `kl_patience` updates the run stops early.",
    )
    min_kl: float = Field(
        0.01,
        ge=0,
        description="Below it for `kl_patience` updates after warm-up the policy does not move: the run stops.",
    )
    kl_patience: int = Field(5, ge=1)
    whiten_rewards: bool = Field(
        False, description="Divide token rewards by their standard deviation (no mean shift)."
    )
    score_clip: float = Field(
        5.0, gt=0, description="Scores are clipped to +- this after normalisation."
    )
    missing_eos_penalty: float = Field(
        0.3, ge=0, description="Subtracted from the score of a response without EOS."
    )
    length_penalty: float = Field(
        0.0, ge=0, description="Subtracted from the score for each token above `free_length`."
    )
    free_length: int = Field(0, ge=0, description="Tokens that cost nothing.")
    reward_weight: float = Field(
        1.0, description="Weight of the reward stage's model in the score."
    )
    rewards: list[RewardSource] = Field(
        default_factory=list, description="Further rewards, each logged, added with its weight."
    )
    critic: Critic = Field(
        Critic.reward,
        description="`reward`: a copy of the reward model with weights of its own; `policy`: a value head on the policy's trunk.",
    )
    save_updates: int = Field(
        10, ge=1, description="A checkpoint to evaluate every so many updates."
    )
    validation_prompts: int = Field(
        64,
        ge=1,
        description="Prompts that PPO does not train on, on which the judge compares policies.",
    )
    validation_updates: int = Field(
        4,
        ge=1,
        description="The judge looks every so many updates; its best policy within `max_kl` is the one that is kept.",
    )
    on_danger: OnDanger = Field(
        OnDanger.stop, description="What a danger that the health monitor finds does to the run."
    )
    resume_updates: int = Field(
        1, ge=1, description="What a killed run goes on from is saved every so many updates."
    )
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    critic_lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=10))

    @model_validator(mode="after")
    def batches_divide(self) -> "PpoParams":
        if self.batch_size % self.mini_batch_size or self.mini_batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of mini_batch_size {self.mini_batch_size}, "
                f"and that of micro_batch_size {self.micro_batch_size}"
            )
        names = [source.name for source in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"ppo.rewards: names {names} must differ")
        return self
