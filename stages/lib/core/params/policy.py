"""Sections of params.yaml for training the policy: `ppo` and its alternatives.

docs/algorithms.md compares the algorithms. Keys have TRL's names.
"""

from enum import Enum
from typing import Annotated

from pydantic import Field, model_validator

from stages.lib.core.params.engines import Options, check_settings
from stages.lib.core.params.shared import URL_PATTERN, LoraParams, ParamsSection, PathText


class Algorithm(str, Enum):
    ppo = "ppo"
    dpo = "dpo"
    rloo = "rloo"
    grpo = "grpo"
    best_of_n = "best_of_n"


OFFLINE = (Algorithm.dpo, Algorithm.best_of_n)  # the others train on the policy's own responses


class OfflineParams(ParamsSection):
    """An algorithm that trains on texts that exist before training starts."""

    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate.")
    per_device_train_batch_size: int = Field(
        16, ge=1, description="Pairs or texts per optimiser step."
    )
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training data.")


class DpoLoss(str, Enum):
    sigmoid = "sigmoid"
    sigmoid_norm = "sigmoid_norm"
    sft = "sft"


class DpoParams(OfflineParams):
    beta: float = Field(
        0.1,
        gt=0,
        description="KL regularisation: the higher, the closer the policy stays to SFT.",
    )
    loss_type: list[DpoLoss] = Field(
        [DpoLoss.sigmoid, DpoLoss.sft],
        min_length=1,
        description="Losses that are added, by TRL's names: `sigmoid` is DPO's, `sigmoid_norm` "
        "divides by the lengths of the responses, `sft` is the loss on the chosen response.",
    )
    loss_weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        [1.0, 0.2], description="Weight of each loss of `loss_type`; null: 1."
    )

    @model_validator(mode="after")
    def one_weight_per_loss(self) -> "DpoParams":
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} numbers and loss_type "
                f"{len(self.loss_type)} losses: give one weight per loss, or null"
            )
        return self


class BestOfNParams(OfflineParams):
    n: int = Field(
        8,
        ge=2,
        description="SFT responses per prompt; the one with the highest reward is trained on.",
    )


class OnlineParams(ParamsSection):
    """An algorithm that trains on the policy's own responses.

    Batch sizes, lengths and learning rate are those of `ppo`.
    """

    num_generations: int = Field(
        4,
        ge=2,
        description="Responses per prompt, compared with each other; divides ppo.batch_size.",
    )


class RlooParams(OnlineParams):
    beta: float = Field(
        0.05, ge=0, description="KL coefficient: subtracted from the reward per nat per sequence."
    )


class GrpoLoss(str, Enum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"


class ScaleRewards(str, Enum):
    group = "group"
    batch = "batch"
    none = "none"


class GrpoParams(OnlineParams):
    beta: float = Field(
        0.11, ge=0, description="KL coefficient: added to the loss per nat per token (k3)."
    )
    loss_type: GrpoLoss = Field(
        GrpoLoss.grpo,
        description="Mean over the tokens of each response (`grpo`), over all tokens (`dapo`), or "
        "sums over a constant length (`dr_grpo`); only the first depends on a response's length.",
    )
    scale_rewards: ScaleRewards = Field(
        ScaleRewards.group,
        description="Distances from the mean reward of a prompt are divided by the standard "
        "deviation of the `group`, of the `batch`, or not (`none`).",
    )


class OnDanger(str, Enum):
    stop = "stop"
    warn = "warn"


class KlControl(str, Enum):
    adaptive = "adaptive"
    proportional = "proportional"
    fixed = "fixed"


class PolicyStart(str, Enum):
    sft = "sft"
    champion = "champion"


class PolicySelection(str, Enum):
    target_kl = "target_kl"
    best_update = "best_update"


class LossLevel(str, Enum):
    token = "token"
    sequence = "sequence"


class Engine(str, Enum):
    local = "local"
    openrlhf = "openrlhf"
    verl = "verl"
    nemo_rl = "nemo_rl"


class Critic(str, Enum):
    reward = "reward"
    policy = "policy"


class RewardSource(ParamsSection):
    """A further reward for PPO, with exactly one of model, function, url."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", description="Name of its column in metrics and rollouts."
    )
    weight: float = Field(1.0, description="Weight in the total score.")
    model: PathText | None = Field(
        None,
        description="Folder or `org/name@COMMIT` of a reward model; calibrated if its config has "
        "mean and std.",
    )
    function: PathText | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="`module:name` of `reward(prompts, responses) -> list[float]` in the "
        "project's folder; docs/ppo.md lists further parameters.",
    )
    url: str | None = Field(
        None,
        pattern=URL_PATTERN,
        description="Address of a reward model over HTTP (OpenRLHF's protocol).",
    )

    @model_validator(mode="after")
    def one_kind(self) -> "RewardSource":
        if sum(kind is not None for kind in (self.model, self.function, self.url)) != 1:
            raise ValueError(f"reward {self.name}: give exactly one of model, function, url")
        return self


class PpoParams(ParamsSection):
    model: PathText | None = Field(
        None,
        description="Folder or `org/name@COMMIT` of a policy to use as it is, or of an adapter of "
        "the SFT model; null: train one.",
    )
    engine: Engine = Field(
        Engine.local,
        description="Who trains: `local`: Rondo itself; `openrlhf`, `verl`, `nemo_rl`: OpenRLHF, "
        "verl or NeMo RL, as a job of the Ray cluster at launcher.ray_address (docs/engines.md).",
    )
    engine_options: Options = Field(
        default_factory=dict,
        description="Further options of the engine, by its names, e.g. `ds.zero_stage: 2`; the "
        "engine checks them.",
    )
    batch_size: int = Field(
        32, ge=2, description="Episodes per rollout: prompts sampled per update."
    )
    mini_batch_size: int = Field(
        32, ge=1, description="Episodes per optimiser step; divides batch_size."
    )
    micro_batch_size: int = Field(
        32,
        ge=1,
        description="Episodes per forward pass; divides mini_batch_size. Changes memory, not "
        "results.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute the activations of each layer again in the backward pass: much less "
        "memory per token, a third more computation.",
    )
    total_episodes: int = Field(480, ge=2, description="Episodes of the whole run.")
    max_steps: int | None = Field(
        None, ge=1, description="Updates at most, for smoke runs; null: no limit."
    )
    num_ppo_epochs: int = Field(3, ge=1, description="Passes over each rollout.")
    num_critic_epochs: int | None = Field(
        None, ge=1, description="Passes of the critic over each rollout; null: `num_ppo_epochs`."
    )
    critic_warmup_epochs: int = Field(
        3,
        ge=0,
        description="Passes of the critic over the responses of the first validation, before the "
        "first update.",
    )
    response_length: int = Field(24, ge=1, description="Tokens per response, at most.")
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature; also divides the logits in training."
    )
    learning_rate: float = Field(5e-4, gt=0, description="Learning rate of the policy.")
    critic_learning_rate: float = Field(5e-4, gt=0, description="Learning rate of the critic.")
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rates rise.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradients are clipped to this norm, policy and critic separately."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(0.8, ge=0, le=1, description="GAE's lambda.")
    cliprange: float = Field(
        0.2, gt=0, description="Clip range of the probability ratio per token."
    )
    cliprange_high: float | None = Field(
        None, gt=0, description="Clip range above 1 (DAPO's clip-higher: 0.28); null: `cliprange`."
    )
    delta: float | None = Field(
        None,
        gt=1,
        description="Largest ratio with a negative advantage (dual clip: 3); null: no bound.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Leave responses without EOS out of the policy's loss (DAPO)."
    )
    vllm_importance_sampling_clip_max: float = Field(
        3.0,
        gt=0,
        description="With vLLM, losses are weighted by p_policy / p_vllm, at most this.",
    )
    cliprange_sequence: float = Field(
        4e-4,
        gt=0,
        description="Clip range of the ratio per sequence to the power of 1 / length, if "
        "`loss_level` is `sequence`.",
    )
    loss_level: LossLevel = Field(
        LossLevel.token, description="Ratio and clip per `token`, or per `sequence` (GSPO)."
    )
    cliprange_value: float = Field(0.2, gt=0, description="Clip range of the critic's values.")
    vf_coef: float = Field(
        0.1, ge=0, description="Weight of the value loss, with `critic: policy`."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    kl_coef: float = Field(
        0.11, ge=0, description="Initial KL coefficient (beta), score units per nat."
    )
    kl_control: KlControl = Field(
        KlControl.adaptive,
        description="`adaptive`: Ziegler et al. 2019; `proportional`: by the relative error; "
        "`fixed`: constant beta.",
    )
    target_kl_per_token: float = Field(
        0.45,
        gt=0,
        description="KL that the controller aims at and the selected policy has, nats per token of "
        "SFT's responses.",
    )
    kl_horizon: int = Field(
        64,
        ge=1,
        description="Episodes over which beta adapts; use a small value for short runs. Below "
        "batch_size it has no further effect.",
    )
    max_kl_per_token: float = Field(
        0.7,
        gt=0,
        description="KL budget, nats per token of SFT's responses. Above it for `kl_patience` "
        "updates the run stops.",
    )
    min_kl_per_token: float = Field(
        0.0005,
        ge=0,
        description="Nats per token. Below it, or below twice what rounding gives, for "
        "`kl_patience` updates after warm-up the policy does not move: the run stops. 0: never.",
    )
    kl_patience: int = Field(
        5,
        ge=1,
        description="Updates in a row outside of min_kl_per_token..max_kl_per_token that count.",
    )
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
        0.0, ge=0, description="Subtracted from the score per token above `free_length`."
    )
    free_length: int = Field(0, ge=0, description="Tokens without length penalty.")
    reward_weight: float = Field(
        1.0, description="Weight of the reward stage's model in the score."
    )
    rewards: list[RewardSource] = Field(
        default_factory=list,
        description="Further rewards; each is logged and added with its weight.",
    )
    reward_url: str | None = Field(
        None,
        pattern=URL_PATTERN,
        description="Address of `rondo serve-reward` for the round: PPO gets the scores there, and "
        "loads no reward model. Needs critic: policy.",
    )
    max_failed_rewards: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Responses whose further rewards failed are left out; the run stops if they "
        "are more than this share of a rollout.",
    )
    critic: Critic = Field(
        Critic.reward,
        description="`reward`: a copy of the reward model with its own weights; `policy`: a value "
        "head on the policy.",
    )
    save_updates: int = Field(
        5, ge=1, description="Updates between checkpoints that can be evaluated."
    )
    validation_prompts: int = Field(
        128,
        ge=1,
        description="Prompts that PPO does not train on, to compare policies by the judge.",
    )
    validation_updates: int = Field(8, ge=1, description="Updates between validations.")
    policy_selection: PolicySelection = Field(
        PolicySelection.target_kl,
        description="`target_kl`: the last policy, scaled towards SFT until its KL is "
        "`target_kl_per_token`; `best_update`: the judge's best update within `max_kl_per_token`.",
    )
    on_danger: OnDanger = Field(
        OnDanger.stop,
        description="If the health monitor finds a danger: `stop` the run, or `warn`.",
    )
    resume_updates: int = Field(
        1, ge=1, description="Updates between saved states from which a killed run resumes."
    )
    init_from: PolicyStart = Field(
        PolicyStart.champion,
        description="Weights that PPO starts from: the round's `sft` model, or those of the "
        "`champion`, if there is one. The KL is from the round's SFT model in both cases.",
    )
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    critic_lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=10))

    @model_validator(mode="after")
    def keys_agree(self) -> "PpoParams":
        if self.batch_size % self.mini_batch_size or self.mini_batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of "
                f"mini_batch_size {self.mini_batch_size}, "
                f"and that of micro_batch_size {self.micro_batch_size}"
            )
        if not self.kl_coef and self.kl_control is not KlControl.fixed:
            raise ValueError(
                f"kl_coef 0 stays 0 with kl_control {self.kl_control.value}, which multiplies it: "
                "set kl_control to fixed, or kl_coef above 0"
            )
        scales = self.policy_selection is PolicySelection.target_kl
        if scales and self.target_kl_per_token > self.max_kl_per_token:
            raise ValueError(
                f"target_kl_per_token {self.target_kl_per_token} is above max_kl_per_token "
                f"{self.max_kl_per_token}, the budget of the selected policy: lower it, or raise "
                "the budget (and gates.promote.max_kl_per_token, if it is less)"
            )
        if self.reward_url and self.critic is not Critic.policy:
            raise ValueError(
                "reward_url: the critic cannot start from a reward model that PPO does not load: "
                "set critic to policy"
            )
        if self.engine is not Engine.local:
            if self.model:
                raise ValueError(f"model: nothing is left for engine {self.engine.value} to train")
            check_settings(self.engine.value, self)
        elif self.engine_options:
            raise ValueError("engine_options: engine is local, which has none: remove them")
        names = [source.name for source in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"ppo.rewards: the names {names} must differ")
        return self


class PolicySections(ParamsSection):
    """How the policy is trained: the algorithm, and a section of params.yaml for each."""

    algorithm: Algorithm = Field(
        Algorithm.ppo,
        description="How the policy is trained from the SFT model (docs/algorithms.md).",
    )
    ppo: PpoParams = Field(default_factory=PpoParams)
    dpo: DpoParams = Field(default_factory=DpoParams)
    best_of_n: BestOfNParams = Field(default_factory=BestOfNParams)
    rloo: RlooParams = Field(default_factory=RlooParams)
    grpo: GrpoParams = Field(default_factory=GrpoParams)
