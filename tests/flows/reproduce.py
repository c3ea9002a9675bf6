"""Stages of a small project, by a DVC in this process: a process for each takes seconds."""

import pytest

from flows.execution.dvc_stages import command_environment, open_repo


def reproduce(addresses: list[str]) -> list[str]:
    """Bring stages up to date; returns those that were not."""
    with pytest.MonkeyPatch.context() as environment, open_repo() as repo:
        environment.setenv("PATH", command_environment()["PATH"])
        return [one for one in addresses if repo.reproduce(one, single_item=True)]
