"""The section [tool.rondo] of pyproject.toml: what params.yaml may reach outside the project.

A form in the browser writes params.yaml, but never pyproject.toml.
"""

import os
import tomllib
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, Field, ValidationError

from stages.lib.core.errors import BadInput, format_validation_errors

FILE = Path("pyproject.toml")


class ProjectLimits(BaseModel, extra="forbid"):
    """api_keys: addresses of the servers that get the value of an environment variable, by the
    variable's name. folders: outside the project, with data or models for runs that are started in
    the browser.
    """

    api_keys: dict[str, list[str]] = Field(default_factory=dict)
    folders: list[Path] = Field(default_factory=list)


def read_limits() -> ProjectLimits:
    """The limits of the project in the working directory; nothing is allowed without a file.

    Raises:
        BadInput: pyproject.toml is not valid.
    """
    try:
        document = tomllib.loads(FILE.read_text(encoding="utf-8"))
        return ProjectLimits.model_validate(document.get("tool", {}).get("rondo", {}))
    except FileNotFoundError:
        return ProjectLimits()
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{FILE}: not TOML: {error}") from None
    except ValidationError as error:
        raise BadInput(f"{FILE} [tool.rondo]: {format_validation_errors(error)}") from None


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
