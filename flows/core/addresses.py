"""Addresses of DVC stages: `ppo@r0`, and their names in Prefect."""

import re


def split_address(address: str) -> tuple[str, str]:
    """`sft@r0` -> (`sft`, `r0`); `assets`, which all rounds share, has the round ``."""
    stage, _, round_ = address.partition("@")
    return stage, round_


def slug(address: str) -> str:
    """`gate_sft@r0` -> `gate-sft-r0`: a key in Prefect."""
    return re.sub(r"[^a-z0-9]+", "-", address)
