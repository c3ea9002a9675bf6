"""The section [tool.rondo] of pyproject.toml: what params.yaml may reach outside the project.

A form in the browser writes params.yaml, but never pyproject.toml.
"""

import os
import tomllib
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, Field

from stages.lib.core.errors import BadInput
from stages.lib.core.reading import read_text
from stages.lib.core.validation import check_type

FILE = Path("pyproject.toml")


class ProjectLimits(BaseModel, extra="forbid"):
    """api_keys: addresses of the servers that get the value of an environment variable, by the
    variable's name. folders: outside the project, with data or models for runs that are started in
    the browser.
    """

    api_keys: dict[str, list[str]] = Field(default_factory=dict)
    folders: list[Path] = Field(default_factory=list)


class Tools(BaseModel):
    rondo: ProjectLimits = Field(default_factory=ProjectLimits)


class ToolTable(BaseModel):
    """What is read of pyproject.toml."""

    tool: Tools = Field(default_factory=Tools)


def read_limits() -> ProjectLimits:
    """The limits of the project in the working directory; nothing is allowed without a file.

    Raises:
        BadInput: pyproject.toml is not valid.
    """
    if not FILE.exists():
        return ProjectLimits()
    try:
        document = tomllib.loads(read_text(FILE, "correct the file"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{FILE}: not TOML: {error}; correct the file") from None
    table = check_type(ToolTable, document, f"{FILE} [tool.rondo]", "correct the key")
    return table.tool.rondo


def read_api_key(variable: str, server: str) -> str | None:
    """The value of an environment variable; None if it is not set, or not for this server.

    Args:
        variable: its name, from params.yaml.
        server: the address that the key would be sent to, from params.yaml.
    """
    servers = read_limits().api_keys.get(variable, [])
    allowed = _origin(urlsplit(server)) in [_origin(urlsplit(url)) for url in servers]
    return os.environ.get(variable) if allowed else None


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port
