"""Addresses of DVC stages, such as `ppo@r0`, and their keys in Prefect."""

import re


def split_address(address: str) -> tuple[str, str]:
    """Split an address into stage and round: `sft@r0` -> (`sft`, `r0`).

    `assets`, which all rounds share, has the empty round ``.
    """
    stage, _, round_ = address.partition("@")
    return stage, round_


def slug(address: str) -> str:
    """The key of an address in Prefect: `gate_sft@r0` -> `gate-sft-r0`."""
    return re.sub(r"[^a-z0-9]+", "-", address)
