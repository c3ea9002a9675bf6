"""The schema of params.yaml, and of single settings (`--set`, the form in the Prefect UI).

Each section is a pydantic model in a module of this package; `Params` joins them and checks what
concerns more than one section. Keys have the names of TRL and
transformers, if these have such a key. Units: nats for KL and log-probabilities, tokens for
lengths, episodes (one prompt with its response) for horizons.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from stages.lib.core.errors import SHOWN_ERRORS, BadInput, and_more
from stages.lib.core.params.data import (
    START,
    AssetsParams,
    PrepareParams,
    RoundName,
    RoundParams,
    rounds,
)
from stages.lib.core.params.evaluation import (
    FLUENCY,
    HELD_OUT_REWARD_MODEL,
    BatteryParams,
    CapabilityParams,
    EvaluateParams,
    ReplayParams,
)
from stages.lib.core.params.gates import GatesParams
from stages.lib.core.params.judging import AnnotateParams, Annotator, EndpointParams, JudgeName
from stages.lib.core.params.policy import (
    OFFLINE,
    Algorithm,
    Critic,
    Engine,
    OnlineParams,
    PolicySections,
)
from stages.lib.core.params.shared import LauncherParams, LauncherType, ModelParams, ParamsSection
from stages.lib.core.params.tracking import MlflowParams
from stages.lib.core.params.training import RewardParams, SftParams
from stages.lib.core.reading import read_yaml

PARAMS_FILE = Path("params.yaml")
# stages that several processes share (stages/lib/lm/world.py)
SHARED = ("sft", "reward", "battery", "ppo", "evaluate", "replay")


class Params(PolicySections):
    """All of params.yaml."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of data splits, training and sampling.")
    rounds: dict[RoundName, RoundParams] = Field(
        default_factory=lambda: rounds(2),
        description="Rounds by name; each names the round before it.",
    )
    assets: AssetsParams = Field(default_factory=AssetsParams)
    prepare: PrepareParams = Field(default_factory=PrepareParams)
    model: ModelParams = Field(default_factory=ModelParams)
    launcher: LauncherParams = Field(default_factory=LauncherParams)
    sft: SftParams = Field(default_factory=SftParams)
    annotate: AnnotateParams = Field(default_factory=AnnotateParams)
    reward: RewardParams = Field(default_factory=RewardParams)
    evaluate: EvaluateParams = Field(default_factory=EvaluateParams)
    capability: CapabilityParams = Field(default_factory=CapabilityParams)
    replay: ReplayParams = Field(default_factory=ReplayParams)
    battery: BatteryParams = Field(default_factory=BatteryParams)
    gates: GatesParams = Field(default_factory=GatesParams)
    mlflow: MlflowParams = Field(default_factory=MlflowParams)

    def language_models(self) -> dict[str, tuple[str, EndpointParams]]:
        """The language models among evaluate.judges.

        Returns:
            By judge name: (key of its section in params.yaml, that section).
        """
        known = {JudgeName.endpoint.value: ("annotate.endpoint", self.annotate.endpoint)}
        for name, endpoint in self.evaluate.endpoints.items():
            known[f"{JudgeName.endpoint.value}:{name}"] = (f"evaluate.endpoints.{name}", endpoint)
        return {named: known[named] for named in self.evaluate.judges if named in known}

    @model_validator(mode="after")
    def endpoints_are_described(self) -> "Params":
        required = {
            f"evaluate.judges has {named}": section
            for named, section in self.language_models().items()
        }
        by_principles = "annotate.constitution is set"  # in place of a rubric
        if self.annotate.asks_language_model:
            reason = by_principles if self.annotate.constitution else "annotate.judge is endpoint"
            required[reason] = ("annotate.endpoint", self.annotate.endpoint)
        for reason, (key, endpoint) in required.items():
            names = ["base_url", "model", *([] if reason is by_principles else ["rubric"])]
            if missing := [f"{key}.{name}" for name in names if getattr(endpoint, name) is None]:
                raise ValueError(
                    f"{reason}: set {' and '.join(missing)} (docs/annotate.md has examples)"
                )
        for named in self.evaluate.judges:
            if (
                named.startswith(f"{JudgeName.endpoint.value}:")
                and named not in self.language_models()
            ):
                raise ValueError(
                    f"evaluate.judges has {named}: describe it in evaluate.endpoints "
                    "(docs/evaluation.md)"
                )
        return self

    @model_validator(mode="after")
    def held_out_reward_model_has_pairs(self) -> "Params":
        if HELD_OUT_REWARD_MODEL in self.evaluate.judges and not self.reward.judge_share:
            raise ValueError(
                "evaluate.judges has `apart`: set reward.judge_share, e.g. to 0.5, "
                "to reserve pairs for its training"
            )
        return self

    @model_validator(mode="after")
    def processes_have_work(self) -> "Params":
        number = self.launcher.processes
        if number > self.ppo.mini_batch_size and self.algorithm not in OFFLINE:
            raise ValueError(
                f"launcher.processes {number} is more than ppo.mini_batch_size "
                f"{self.ppo.mini_batch_size}: some would have no episode"
            )
        if number > 1 and self.model.use_vllm:
            raise ValueError(
                "launcher.processes above 1 with model.use_vllm is not supported: set one of them "
                "to its default"
            )
        return self

    @model_validator(mode="after")
    def sharded_models_are_whole(self) -> "Params":
        if not self.launcher.shard:
            return self
        ppo, processes = self.ppo, self.launcher.processes
        critic_is_whole = ppo.critic is Critic.policy or not ppo.critic_lora.r
        needed = {
            f"launcher.processes above 1 (got {processes})": processes > 1,
            f"algorithm ppo (got {self.algorithm.value})": self.algorithm is Algorithm.ppo,
            f"ppo.engine local (got {ppo.engine.value})": ppo.engine is Engine.local,
            f"ppo.lora.r 0 (got {ppo.lora.r}), since adapters are not divided": not ppo.lora.r,
            f"ppo.critic_lora.r 0 (got {ppo.critic_lora.r}), or ppo.critic policy": critic_is_whole,
        }
        if missing := [setting for setting, is_so in needed.items() if not is_so]:
            raise ValueError(
                f"launcher.shard needs {'; '.join(missing)}: set what it needs, or launcher.shard "
                "to false (docs/scale.md)"
            )
        return self

    @model_validator(mode="after")
    def ray_has_an_address(self) -> "Params":
        needs = "launcher.type ray" if self.launcher.type is LauncherType.ray else ""
        if self.ppo.engine is not Engine.local:
            needs = f"ppo.engine {self.ppo.engine.value}"
        if needs and self.launcher.ray_address is None:
            raise ValueError(
                f"{needs}: set launcher.ray_address to the Ray cluster's dashboard, e.g. "
                "http://127.0.0.1:8265 (docs/scale.md, docs/engines.md)"
            )
        return self

    @model_validator(mode="after")
    def engines_train_by_ppo(self) -> "Params":
        if self.ppo.engine is not Engine.local and self.algorithm is not Algorithm.ppo:
            raise ValueError(
                f"ppo.engine {self.ppo.engine.value}: algorithm is {self.algorithm.value}, which "
                "Rondo trains itself: set ppo.engine to local"
            )
        return self

    def check_pairs_not_needed(self) -> None:
        """Check that no setting needs preference pairs, of which the data have none.

        Raises:
            BadInput: names each setting that does, and how to do without a reward model.
        """
        ppo, judge = self.ppo, HELD_OUT_REWARD_MODEL
        starts_as_reward = self.algorithm is Algorithm.ppo and ppo.critic is Critic.reward
        needs = {
            f"ppo.reward_weight to 0 (it is {ppo.reward_weight:g})": ppo.reward_weight != 0,
            "ppo.rewards to a reward of your own (docs/ppo.md)": not ppo.rewards,
            "ppo.critic to policy": starts_as_reward,
            "ppo.reward_url to null": ppo.reward_url is not None,
            "algorithm to another one than dpo": self.algorithm is Algorithm.dpo,
            f"evaluate.judges without {judge}": judge in self.evaluate.judges,
            "annotate.annotator to dataset": self.annotate.annotator is Annotator.judge,
        }
        if missing := [setting for setting, is_so in needs.items() if is_so]:
            raise BadInput(
                "there are no preference pairs, which a reward model is trained and measured on: "
                f"add pairs (docs/data.md), or do without a reward model: set {', '.join(missing)}"
            )

    def check_demonstrations_not_needed(self) -> None:
        """Check that no setting needs demonstrations, of which the data have none.

        Raises:
            BadInput: a judge does.
        """
        if FLUENCY in self.evaluate.judges:
            raise BadInput(
                f"there are no demonstrations, with which the judge {FLUENCY} compares responses: "
                f"add demonstrations (docs/data.md), or set evaluate.judges without {FLUENCY}"
            )

    def processes(self, stage: str) -> int:
        """How many processes share the work of a stage; one follows an engine."""
        if self._has_engine(stage):
            return 1
        return self.launcher.processes if stage in SHARED else 1

    def cluster(self, stage: str) -> str | None:
        """The address of the Ray cluster on which the processes of a stage run; None: they run
        here.
        """
        launcher, engine = self.launcher, self._has_engine(stage)
        there = launcher.type is LauncherType.ray and stage in SHARED and not engine
        return launcher.ray_address if there else None

    def _has_engine(self, stage: str) -> bool:
        return stage == "ppo" and self.ppo.engine is not Engine.local

    def check_round(self, name: str) -> None:
        """Check that params.yaml has this round.

        Raises:
            BadInput: there is no such round.
        """
        if name not in self.rounds:
            raise BadInput(
                f"--round {name}: not in params.yaml `rounds` ({', '.join(self.rounds)})"
            )

    @model_validator(mode="after")
    def rounds_follow_each_other(self) -> "Params":
        before, of_this_file = list[str](), {f"rounds/{name}" for name in self.rounds}
        for name, round_ in self.rounds.items():
            previous = round_.previous
            # the file of an ended round has that round alone
            if previous in of_this_file and previous not in before:
                expected = ", ".join([START, *before])
                raise ValueError(
                    f"rounds.{name}.previous is {previous}, which is no round before it; "
                    f"expected one of {expected}"
                )
            before.append(f"rounds/{name}")
        return self

    @model_validator(mode="after")
    def only_ppo_is_served(self) -> "Params":
        if self.ppo.reward_url and self.algorithm is not Algorithm.ppo:
            raise ValueError(
                f"ppo.reward_url: only ppo is served, not {self.algorithm.value}: set it to null"
            )
        return self

    @model_validator(mode="after")
    def groups_divide(self) -> "Params":
        name, size = self.algorithm.value, self.ppo.batch_size
        own = getattr(self, name)
        if isinstance(own, OnlineParams) and size % own.num_generations:
            raise ValueError(
                f"ppo.batch_size {size} must be a multiple of "
                f"{name}.num_generations {own.num_generations}"
            )
        return self


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and check params.yaml.

    Raises:
        BadInput: the file is missing or not YAML, a key is unknown, or a value is out of range;
            the message names each key.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file here; run from the project's folder")
    values = read_yaml(path, f"correct it, or restore it, e.g. with `git checkout {path}`")
    if values is None:  # e.g. after a power cut: it must not mean "the defaults"
        raise BadInput(f"{path} is empty: restore it, e.g. with `git checkout {path}`")
    return check_params(values, str(path))


def check_params(values: dict[str, Any], source: str) -> Params:
    """Validate a mapping of sections.

    Args:
        values: values by key, nested as in params.yaml; missing keys get their defaults.
        source: name of the mapping, for the error message.

    Raises:
        BadInput: a key is unknown or a value is out of range; the message names each key.
    """
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        errors = error.errors()
        shown = [*map(_describe_error, errors[:SHOWN_ERRORS]), *and_more(len(errors))]
        # the checks of this package name their own next step
        if any(details["type"] != "value_error" for details in errors):
            shown.append(f"next: correct the {'key' if len(errors) == 1 else 'keys'}")
        raise BadInput(f"{source}: {'; '.join(shown)}") from None


def _describe_error(error: Any) -> str:
    """One pydantic error: key, reason, value, and the known key that is spelled most alike."""
    key = ".".join(map(str, error["loc"])) or "params"
    known = (
        [name for name, _ in flatten(Params().model_dump(), separator=".")]
        if error["type"] == "extra_forbidden"
        else []
    )
    near = get_close_matches(key, known, n=1, cutoff=0.7)
    # a check of several keys has the whole section as its input
    is_section = isinstance(error["input"], Mapping | ParamsSection)
    value = "" if is_section else f" (got {error['input']!r:.60})"
    hint = "".join(f"; did you mean {name}?" for name in near)
    return f"{key:.200}: {error['msg']:.300}{value}{hint}"


def flatten(
    values: Mapping[str, Any], prefix: str = "", separator: str = "/"
) -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to pairs of path and value.

    >>> list(flatten({"ppo": {"kl": 1, "lora": {"r": 16}}}))
    [('ppo/kl', 1), ('ppo/lora/r', 16)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}{separator}", separator)
        else:
            yield f"{prefix}{key}", value
