"""Refuses stages that cannot fit in memory, and finds the keys that would make them fit."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

from rich.filesize import decimal

from flows.core.config import nest, overlay
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import Algorithm

# The estimate may be off by this factor: a stage is refused if it does not fit even though the
# estimate is too high by it, and warned of if it may not fit because the estimate is too low by it.
MARGIN = 1.2
Settings = dict[str, Any]  # values by dotted key
Measure = Callable[[Params], Mapping[str, float]]  # bytes by stage


def check(params: Params, stages: set[str], total: float, measure: Measure) -> Mapping[str, float]:
    """Check that each stage fits in the memory of this machine.

    Args:
        params: settings of the run.
        stages: those that the run would start.
        total: bytes of the GPU, or of RAM without one.
        measure: estimates the memory of the stages.

    Returns:
        Bytes by stage, of all stages.

    Raises:
        RondoError: a stage needs more; names the keys to lower, the values, and their effect.
    """
    sizes = measure(params)
    for stage, size in sizes.items():
        if stage in stages and size > MARGIN * total:
            raise RondoError(
                f"{stage} needs about {decimal(int(size))} of memory, and this machine has "
                f"{decimal(int(total))}: {advice(params, stage, total, measure)} (docs/running.md, "
                "Memory)"
            )
    return sizes


def warnings(params: Params, needed: Mapping[str, float], known: bool, free: float) -> list[str]:
    """Lines about stages that may not fit in the free memory, or about an unknown model.

    Args:
        needed: bytes by stage.
        known: whether the shape of the base model is.
    """
    if not known:
        return [
            f"warning: the size of assets.model {params.assets.model} is not known (it is no local "
            "folder, and the hub cannot be reached): minutes and disk are those of the embedded "
            "model, and memory is not estimated"
        ]
    return [
        f"warning: {stage} needs about {size / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB free"
        for stage, size in needed.items()
        if size * MARGIN > free
    ]


def advice(params: Params, stage: str, total: float, measure: Measure) -> str:
    """The changes that make a stage fit: of each kind the smallest one; combined and costly kinds
    only if no other does.
    """
    options: list[str] = []
    for kind, last_resort in _kinds(params, stage):
        if options and last_resort:
            break
        for settings in kind:
            changed = _changed(params, settings)
            if changed and (size := measure(changed)[stage]) <= total:
                options.append(f"{_described(params, settings)}: {decimal(int(size))}")
                break
    if options:
        return "set " + "; or ".join(options)
    return (
        "no smaller batch makes it fit; choose a smaller assets.model, shorter texts "
        "(prepare.max_prompt_tokens, ppo.response_length, sft.max_length, reward.max_length) or "
        "a machine with more memory"
    )


def _described(params: Params, settings: Settings) -> str:
    """`sft.a 16 -> 4, with sft.b 1 -> 4`."""
    values = params.model_dump(mode="json")

    def old(key: str) -> Any:
        return reduce(lambda section, name: section[name], key.split("."), values)

    changes = [f"{key} {_yaml(old(key))} -> {_yaml(new)}" for key, new in settings.items()]
    return ", with ".join(changes)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changed(params: Params, settings: Settings) -> Params | None:
    """The params with other values; None if these do not go together."""
    values = params.model_dump(mode="json")
    for key, value in settings.items():
        values = overlay(values, nest(key, value))
    try:
        return check_params(values, "")
    except BadInput:
        return None


def _kinds(params: Params, stage: str) -> Iterator[tuple[list[Settings], bool]]:
    """Kinds of changes, each in the order of its effect, and whether it is a last resort."""
    adapters: Settings = {}
    if stage in ("sft", "reward"):
        section = getattr(params, stage)
        size, steps = section.per_device_train_batch_size, section.gradient_accumulation_steps
        smaller = [
            {
                f"{stage}.per_device_train_batch_size": size // parts,
                f"{stage}.gradient_accumulation_steps": steps * parts,
            }
            for parts in _divisors(size)
        ]
        recompute = {f"{stage}.gradient_checkpointing": True}
        if not section.lora.r:
            adapters = {f"{stage}.lora.r": 16}
    elif stage == "ppo":
        smaller = _smaller_ppo(params)
        recompute = {"ppo.gradient_checkpointing": True}
        roles = ("lora", "critic_lora")
        adapters = {f"ppo.{role}.r": 16 for role in roles if not getattr(params.ppo, role).r}
    else:
        smaller, recompute = [], {}
    yield smaller, False
    yield [recompute] if recompute else [], False
    if params.processes(stage) > 1:
        yield [{"launcher.processes": 1}], False
    if stage in ("battery", "ppo", "evaluate", "replay"):
        yield [{"reward.ensemble": n} for n in range(params.reward.ensemble - 1, 0, -1)], False
    combined = [settings | recompute for settings in smaller]
    yield combined, True
    if adapters:
        yield [adapters, adapters | recompute, *(adapters | both for both in combined)], True


def _smaller_ppo(params: Params) -> list[Settings]:
    section = {Algorithm.dpo: params.dpo, Algorithm.best_of_n: params.best_of_n}.get(
        params.algorithm
    )
    if section is None:
        key, size = "ppo.micro_batch_size", params.ppo.micro_batch_size
    else:
        key = f"{params.algorithm.value}.per_device_train_batch_size"
        size = section.per_device_train_batch_size
    return [{key: size // parts} for parts in _divisors(size)]


def _divisors(size: int) -> list[int]:
    """Numbers above 1 that divide it, the smallest first."""
    return [parts for parts in range(2, size + 1) if size % parts == 0]
