"""Types that several sections of params.yaml share; a section has no unknown keys."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from stages.lib.core.reading import check_characters

MAX_INTEGER = 2**53  # a float has all integers up to it
MAX_NAME_BYTES, MAX_PATH_CHARACTERS = 255, 1000  # Linux: NAME_MAX, and less than PATH_MAX
# A user and password in an address would be written to params.yaml, logs and branches
URL_PATTERN = r"^https?://[^/?#@\s]+([/?]\S*)?$"


CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")


class ParamsSection(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def can_be_used(cls, value: Any) -> Any:
        """A form in the browser can send half of a surrogate pair, which no file can have, and
        control characters, which YAML cannot have. YAML has integers of any length.
        """
        for text in _texts(value):
            if match := CONTROL.search(check_characters(text)):
                raise ValueError(f"contains the control character U+{ord(match[0]):04X}: remove it")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"expected at most {MAX_INTEGER:,}: set a smaller number")
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inner)


def possible_path(text: str) -> str:
    """A text that the operating system takes as a path, whether or not there is a file.

    Raises:
        ValueError: it has a NUL character, or is longer than any path.
    """
    parts = text.encode(errors="replace").split(b"/")
    if "\0" in text or max(map(len, parts)) > MAX_NAME_BYTES or len(text) > MAX_PATH_CHARACTERS:
        raise ValueError(
            "no possible path or name, choose another: it has a NUL character, more than "
            f"{MAX_NAME_BYTES} bytes between two slashes, or more than {MAX_PATH_CHARACTERS} "
            "characters"
        )
    return text


PathText = Annotated[str, AfterValidator(possible_path)]


class Dtype(str, Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class VllmMode(str, Enum):
    colocate = "colocate"
    server = "server"


class InitFrom(str, Enum):
    base = "base"
    previous = "previous"


class Reduce(str, Enum):
    mean = "mean"
    min = "min"


class PromptFormat(str, Enum):
    plain = "plain"
    chat = "chat"


class LoraParams(ParamsSection):
    r: int = Field(16, ge=0, description="LoRA rank; 0 trains all weights.")
    lora_alpha: int = Field(
        32, ge=1, description="LoRA scaling: adapters are multiplied by lora_alpha / r."
    )
    target_modules: str | list[str] = Field(
        "all-linear", description="Modules that get an adapter."
    )
    top_layers: int | None = Field(
        None,
        ge=1,
        description="Adapters only on this many upper layers, so that lower ones need no backward "
        "pass; null: all.",
    )


class ModelParams(ParamsSection):
    dtype: Dtype = Field(
        Dtype.auto,
        description="`auto`: bfloat16 if the processor multiplies it fast, else float32.",
    )
    attn_implementation: str = Field(
        "auto",
        description="`auto`: `grouped` on a CPU, `flash_attention_2` on a GPU if it is installed; "
        "else, or if the model does not support it, `sdpa`, or `eager` if the model's code has "
        "none. Or the name of another implementation of transformers.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of a process; null: all cores, or OMP_NUM_THREADS.",
    )
    use_vllm: bool = Field(
        False,
        description="Sample with vLLM on a GPU, in every stage (never run on a GPU yet).",
    )
    vllm_mode: VllmMode = Field(
        VllmMode.colocate,
        description="`colocate`: on the same GPU; `server`: a server started with `vllm serve`.",
    )
    vllm_server_base_url: str | None = Field(
        None,
        pattern=URL_PATTERN,
        description="Address of the vLLM server, e.g. http://127.0.0.1:8000.",
    )
    vllm_gpu_memory_utilization: float = Field(
        0.3, gt=0, lt=1, description="Share of GPU memory that vLLM takes with `colocate`."
    )


class LauncherType(str, Enum):
    """How the processes of a stage are started."""

    torchrun = "torchrun"
    ray = "ray"


class LauncherParams(ParamsSection):
    """How a stage is started. No result depends on it, but for rounding."""

    type: LauncherType = Field(
        LauncherType.torchrun,
        description="Where `processes` run: on this machine, by torchrun, or on the Ray cluster of "
        "ray_address, on all of its nodes.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Processes that share the work of most stages, one per GPU if there are any "
        "(docs/scale.md).",
    )
    shard: bool = Field(
        False,
        description="Divide PPO's models, gradients and optimizer states among the processes "
        "(FSDP2), if all weights are trained: needs ppo.lora.r 0 (docs/scale.md; never run on "
        "GPUs).",
    )
    ray_address: str | None = Field(
        None,
        pattern=URL_PATTERN,
        description="Address of the dashboard of a Ray cluster, e.g. http://127.0.0.1:8265, for "
        "type ray (docs/scale.md) and ppo.engine (docs/engines.md).",
    )
    nodes: int = Field(1, ge=1, description="Nodes of the Ray cluster that an engine uses.")
    gpus_per_node: int = Field(8, ge=1, description="GPUs per node that an engine uses.")


class Overlong(str, Enum):
    """What happens to a training text that is longer than max_length."""

    drop = "drop"
    close = "close"


class TrainParams(ParamsSection):
    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    per_device_train_batch_size: int = Field(ge=1, description="Rows per forward pass.")
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="Batches per optimiser step: less memory for the same step."
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute the activations of each layer again in the backward pass: much less "
        "memory per token, a third more computation.",
    )
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training data.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimiser steps at most; null: as many as the epochs need."
    )
    warmup_ratio: float = Field(
        0.1, ge=0, le=1, description="Share of the steps over which the learning rate rises."
    )
    max_length: int = Field(
        96, ge=8, description="Tokens of prompt, response and EOS; see `overlong`."
    )
    overlong: Overlong = Field(
        Overlong.drop,
        description="Rows longer than max_length: `drop` leaves them out and counts them; `close` "
        "cuts the response and ends it with EOS.",
    )
    lora: LoraParams = Field(default_factory=LoraParams)
    init_from: InitFrom = Field(
        InitFrom.previous,
        description="From the second round on: continue from the `previous` round, or start from "
        "`base`.",
    )
    continue_epochs: float | None = Field(
        None,
        gt=0,
        description="Epochs if training continues from the round before; null: num_train_epochs.",
    )
