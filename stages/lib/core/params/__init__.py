"""The one schema of params.yaml, of the command line's `--set`, and of the form in the Prefect UI.

Keys keep TRL's and transformers' names where these exist. Units: nats for KL and
log-probabilities, tokens for lengths, episodes (one prompt with its response) for horizons.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from stages.lib.core.errors import BadInput
from stages.lib.core.params.evaluation import CapabilityParams, ReplayParams
from stages.lib.core.params.gates import GatesParams
from stages.lib.core.params.judging import (
    APART,
    AnnotateParams,
    Annotator,
    EndpointParams,
    EvaluateParams,
    JudgeName,
)
from stages.lib.core.params.policy import (
    Algorithm,
    BestOfNParams,
    DpoParams,
    GrpoParams,
    OnlineParams,
    RlooParams,
)
from stages.lib.core.params.section import Section

PARAMS_FILE = Path("params.yaml")


class Dtype(str, Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class OnDanger(str, Enum):
    stop = "stop"
    warn = "warn"


class InitFrom(str, Enum):
    base = "base"
    previous = "previous"


class Reduce(str, Enum):
    mean = "mean"
    min = "min"


class PromptFormat(str, Enum):
    plain = "plain"
    chat = "chat"


class RoundParams(Section):
    previous: str = Field(
        description="Where the round before left its outputs; `assets/start` for the first round."
    )


class AssetsParams(Section):
    model: str = Field(
        "embedded",
        description="`embedded` (SmolLM2-135M-Instruct), `tiny` (random, for tests), a hub id or a local path.",
    )
    data: str = Field(
        "embedded",
        description="`embedded` (human-rated tweets), `files` (see prepare.sources), or a hub id of preference pairs.",
    )
    data_config: str | None = Field(
        None, description="Configuration (`data_dir`) of the hub data set, e.g. `harmless-base`."
    )


class SourceParams(Section):
    path: str = Field(description="JSONL or Parquet file, or the hub id of a data set.")
    split: str = Field("train", description="Split of a hub data set.")
    use: str = Field(
        "train",
        pattern="^(train|eval)$",
        description="`eval` rows are held out and never trained on.",
    )


class PrepareParams(Section):
    sources: list[SourceParams] = Field(
        default_factory=list, description="The user's own data; used when assets.data is `files`."
    )
    prompt_format: PromptFormat = Field(
        PromptFormat.plain,
        description="`plain`: text continues the prompt; `chat`: the model's chat template.",
    )
    prompt_words: int = Field(
        4, ge=1, le=64, description="Embedded data: opening words of a text that make its prompt."
    )
    min_rating_gap: float = Field(
        0.8,
        gt=0,
        description="Embedded data: least distance of mean human ratings (-4..4) within a pair.",
    )
    demonstration_rating: float = Field(
        1.0, description="Embedded data: least mean human rating of an SFT demonstration."
    )
    eval_share: float = Field(0.2, gt=0, lt=1, description="Share of prompt groups held out.")
    max_bad_share: float = Field(
        0.02, ge=0, le=1, description="More bad rows than this share stops the stage."
    )
    near_duplicate: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Jaccard similarity of word 3-grams above which a row is a duplicate.",
    )
    max_prompt_tokens: int = Field(64, ge=1, description="Longer prompts are dropped and counted.")
    max_rows: int | None = Field(
        None, ge=8, description="Use only so many rows of the sources (for smoke runs)."
    )
    max_eval_prompts: int = Field(88, ge=2, description="Size of the frozen evaluation set.")


class LoraParams(Section):
    r: int = Field(16, ge=0, description="LoRA rank; 0 trains all weights.")
    lora_alpha: int = Field(32, ge=1)
    target_modules: str | list[str] = Field(
        "all-linear", description="Modules that get an adapter."
    )
    top_layers: int | None = Field(
        None,
        ge=1,
        description="Adapters on the upper so many layers only; lower ones then need no backward pass.",
    )


class ModelParams(Section):
    dtype: Dtype = Field(
        Dtype.auto,
        description="`auto`: bfloat16 where the processor multiplies it fast, else float32.",
    )
    attn_implementation: str = Field(
        "grouped",
        description="`grouped` is the fastest on a CPU; `sdpa` or `flash_attention_2` on a GPU, `eager` where neither runs.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads; null: all cores, or OMP_NUM_THREADS."
    )


class TrainParams(Section):
    learning_rate: float = Field(gt=0)
    per_device_train_batch_size: int = Field(ge=1)
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="Batches an optimiser step: less memory for the same step."
    )
    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(
        None, ge=1, description="Optimiser steps at most; null: as the epochs say."
    )
    warmup_ratio: float = Field(0.1, ge=0, le=1)
    max_length: int = Field(
        64, ge=8, description="Tokens of prompt and response; longer rows are cut."
    )
    lora: LoraParams = Field(default_factory=LoraParams)
    init_from: InitFrom = Field(
        InitFrom.previous,
        description="From the second round on: continue from the round before, or start at the base.",
    )
    continue_epochs: float | None = Field(
        None,
        gt=0,
        description="Epochs when continuing from the round before; null: num_train_epochs.",
    )


class SftParams(TrainParams):
    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(16, ge=1)
    num_train_epochs: float = Field(0.7, gt=0)
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    continue_epochs: float | None = Field(
        0.25,
        gt=0,
        description="Epochs when continuing from the round before; null: num_train_epochs.",
    )
    samples_per_prompt: int = Field(
        4,
        ge=1,
        description="Responses of base and SFT to each frozen prompt, side by side for the judge.",
    )


class RewardParams(TrainParams):
    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(16, ge=2)
    num_train_epochs: float = Field(1.0, gt=0)
    continue_epochs: float | None = Field(
        0.5,
        gt=0,
        description="Epochs when continuing from the round before; null: num_train_epochs.",
    )
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    hard_negatives: float = Field(
        0.55,
        ge=0,
        le=1,
        description="Pairs to add, as a share of the pairs: against broken texts, and against bad ones with a good end.",
    )
    judge_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the pairs' prompts that a second reward model learns from alone: `apart` in evaluate.judges.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        le=8,
        description="Reward models that are trained, each with a seed of its own; all score together (Coste et al. 2024).",
    )
    ensemble_reduce: Reduce = Field(
        Reduce.mean,
        description="`mean` of the members' calibrated scores, or the worst case: `min`.",
    )
    center_rewards_coefficient: float | None = Field(
        0.01, ge=0, description="Weight of the squared mean reward of a pair (TRL)."
    )


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


class RewardSource(Section):
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


class PpoParams(Section):
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


class BatteryParams(Section):
    pairs: int = Field(
        96,
        ge=1,
        description="Held-out pairs, of those that share no text, on which probes and endings are tried.",
    )
    prompts: int = Field(
        32,
        ge=1,
        description="Training prompts that the SFT model answers, `best_of`'s largest number of times each.",
    )
    best_of: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 4, 16], min_length=1, description="Sizes of best-of-n."
    )
    endings: list[Annotated[str, Field(min_length=1)]] = Field(
        ["!", " 😃", " Enjoy!"],
        min_length=1,
        description="What a bad text must not become better than a good one by.",
    )


class Params(Section):
    """All of params.yaml."""

    seed: int = Field(0, ge=0)
    rounds: dict[str, RoundParams] = Field(default_factory=lambda: rounds(2))
    assets: AssetsParams = Field(default_factory=AssetsParams)
    prepare: PrepareParams = Field(default_factory=PrepareParams)
    model: ModelParams = Field(default_factory=ModelParams)
    sft: SftParams = Field(default_factory=SftParams)
    annotate: AnnotateParams = Field(default_factory=AnnotateParams)
    reward: RewardParams = Field(default_factory=RewardParams)
    algorithm: Algorithm = Field(
        Algorithm.ppo, description="What makes the policy of the SFT model (docs/algorithms.md)."
    )
    ppo: PpoParams = Field(default_factory=PpoParams)
    dpo: DpoParams = Field(default_factory=DpoParams)
    best_of_n: BestOfNParams = Field(default_factory=BestOfNParams)
    rloo: RlooParams = Field(default_factory=RlooParams)
    grpo: GrpoParams = Field(default_factory=GrpoParams)
    evaluate: EvaluateParams = Field(default_factory=EvaluateParams)
    capability: CapabilityParams = Field(default_factory=CapabilityParams)
    replay: ReplayParams = Field(default_factory=ReplayParams)
    battery: BatteryParams = Field(default_factory=BatteryParams)
    gates: GatesParams = Field(default_factory=GatesParams)

    def language_models(self) -> dict[str, tuple[str, EndpointParams]]:
        """Those of evaluate.judges, by their names there: the key in params.yaml, and what it
        holds.
        """
        known = {JudgeName.endpoint.value: ("annotate.endpoint", self.annotate.endpoint)}
        for name, endpoint in self.evaluate.endpoints.items():
            known[f"{JudgeName.endpoint.value}:{name}"] = (f"evaluate.endpoints.{name}", endpoint)
        return {named: known[named] for named in self.evaluate.judges if named in known}

    @model_validator(mode="after")
    def endpoints_are_described(self) -> "Params":
        asked = {
            f"evaluate.judges has {named}": place for named, place in self.language_models().items()
        }
        if self.annotate.annotator is Annotator.judge and self.annotate.judge is JudgeName.endpoint:
            asked["annotate.judge is endpoint"] = ("annotate.endpoint", self.annotate.endpoint)
        for said, (key, endpoint) in asked.items():
            if missing := [
                f"{key}.{name}" for name in ("base_url", "model") if getattr(endpoint, name) is None
            ]:
                raise ValueError(f"{said}: set {' and '.join(missing)} (docs/annotate.md)")
        for named in self.evaluate.judges:
            if (
                named.startswith(f"{JudgeName.endpoint.value}:")
                and named not in self.language_models()
            ):
                raise ValueError(
                    f"evaluate.judges has {named}: describe it in evaluate.endpoints (docs/evaluation.md)"
                )
        return self

    @model_validator(mode="after")
    def a_judge_apart_has_pairs(self) -> "Params":
        if APART in self.evaluate.judges and not self.reward.judge_share:
            raise ValueError(
                "evaluate.judges has `apart`: set reward.judge_share, e.g. to 0.5, for pairs that it learns from"
            )
        return self

    def check_round(self, name: str) -> None:
        """
        Raises:
            BadInput: there is no such round.
        """
        if name not in self.rounds:
            raise BadInput(
                f"--round {name}: not in params.yaml `rounds` ({', '.join(self.rounds)})"
            )

    @model_validator(mode="after")
    def rounds_follow_each_other(self) -> "Params":
        before: list[str] = []
        for name, each in self.rounds.items():
            if each.previous.startswith("rounds/") and each.previous not in before:
                expected = ", ".join(["assets/start", *before])
                raise ValueError(
                    f"rounds.{name}.previous is {each.previous}, which is no round before it; expected one of {expected}"
                )
            before.append(f"rounds/{name}")
        return self

    @model_validator(mode="after")
    def groups_divide(self) -> "Params":
        online: dict[Algorithm, OnlineParams] = {
            Algorithm.rloo: self.rloo,
            Algorithm.grpo: self.grpo,
        }
        name, size = self.algorithm, self.ppo.batch_size
        if name in online and size % online[name].num_generations:
            raise ValueError(
                f"ppo.batch_size {size} must be a multiple of {name.value}.num_generations {online[name].num_generations}"
            )
        return self


def rounds(number: int) -> dict[str, RoundParams]:
    """`number` rounds r0, r1, ..., each after the one before."""
    return {
        f"r{i}": RoundParams(previous=f"rounds/r{i - 1}" if i else "assets/start")
        for i in range(number)
    }


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and check params.yaml.

    Raises:
        BadInput: no such file, no YAML, an unknown key or a value out of range; names each key.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file here; run from the project's folder") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML: {error}") from None
    return check_params(values or {}, str(path))


def check_params(values: dict[str, Any], source: str) -> Params:
    """Validate a mapping of sections; `source` names it in the error."""
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{source}: {'; '.join(map(_fault, error.errors()))}") from None


def _fault(error: Any) -> str:
    key = ".".join(map(str, error["loc"])) or "params"
    known = (
        [name for name, _ in flatten(Params().model_dump(), separator=".")]
        if error["type"] == "extra_forbidden"
        else []
    )
    near = get_close_matches(key, known, n=1, cutoff=0.7)
    return f"{key}: {error['msg']} (got {error['input']!r:.60})" + "".join(
        f"; did you mean {name}?" for name in near
    )


def flatten(
    values: Mapping[str, Any], prefix: str = "", separator: str = "/"
) -> Iterator[tuple[str, Any]]:
    """`{"ppo": {"kl": 1}}` -> `("ppo/kl", 1)`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}{separator}", separator)
        else:
            yield f"{prefix}{key}", value
