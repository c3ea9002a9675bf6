"""JSONL files that people may have edited: each row is checked against its pydantic model."""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from stages.lib.core.errors import BadInput, format_validation_errors

Model = TypeVar("Model", bound=BaseModel)


def read_json_lines(path: Path, fix: str) -> list[tuple[str, Any]]:
    """Read the value of each line that is not blank, with its location.

    Args:
        path: the file.
        fix: the next step for the user, for messages.

    Returns:
        `(location, value)` per line; a location is `path:line number`.

    Raises:
        BadInput: the file is missing, or a line is not JSON.
    """
    if not path.exists():
        raise BadInput(f"{path} is missing: {fix}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:
                raise BadInput(f"{path}:{number}: no JSON ({error}); {fix}") from None
    return rows


def read_validated_jsonl(kind: type[Model], path: Path, fix: str) -> list[tuple[str, Model]]:
    """Read each row as a `kind`, with its location `path:line number`.

    Raises:
        BadInput: the file is missing, a line is not JSON, or a row is not a valid `kind`.
    """
    return [
        (location, validate_row(kind, row, location, fix))
        for location, row in read_json_lines(path, fix)
    ]


def validate_row(kind: type[Model], row: Any, location: str, fix: str) -> Model:
    """Check one row.

    Args:
        kind: its pydantic model.
        row: the row as parsed from JSON.
        location: where the row is, for messages.
        fix: the next step for the user, for messages.

    Raises:
        BadInput: the row is not a valid `kind`.
    """
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()  # SlicePrompt -> slice prompt
        raise BadInput(
            f"{location}: no {name} ({format_validation_errors(error)}); {fix}"
        ) from None
