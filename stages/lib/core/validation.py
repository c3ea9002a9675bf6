"""JSON lines that people may have written, each checked against its type."""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from stages.lib.core.errors import BadInput, format_validation_errors

Model = TypeVar("Model", bound=BaseModel)


def read_json_lines(path: Path, fix: str) -> list[tuple[str, Any]]:
    """What each line holds, with its place, `path:line`. fix: the next step, for messages.

    Raises:
        BadInput: the file is not there, or a line is no JSON.
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
    """
    Raises:
        BadInput: as read_lines, or a row is none of its kind.
    """
    return [
        (place, validate_row(kind, row, place, fix)) for place, row in read_json_lines(path, fix)
    ]


def validate_row(kind: type[Model], row: Any, place: str, fix: str) -> Model:
    """
    Raises:
        BadInput: the row is none.
    """
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()
        raise BadInput(f"{place}: no {name} ({format_validation_errors(error)}); {fix}") from None
