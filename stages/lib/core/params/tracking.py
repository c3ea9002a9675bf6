"""Section `mlflow` of params.yaml: which models the flow uploads. No stage reads it."""

from enum import Enum

from pydantic import Field

from stages.lib.core.params.shared import ParamsSection


class Upload(str, Enum):
    sft = "sft"
    reward = "reward"
    policy = "policy"
    checkpoints = "checkpoints"


class MlflowParams(ParamsSection):
    upload: list[Upload] = Field(
        list(Upload),
        description="Models whose files MLflow stores, so that they load from its server alone; "
        "an adapter brings its SFT model (docs/running.md).",
    )
