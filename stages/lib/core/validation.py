"""JSON files that people may have edited or cut: each value is checked by its pydantic type."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from stages.lib.core.errors import BadInput, format_validation_errors
from stages.lib.core.files import maker, read_json
from stages.lib.core.reading import check_characters, parse_json, read_lines

# A text that can be written to a file: an argument of the command line may be no UTF-8
Text = Annotated[str, Field(min_length=1), AfterValidator(check_characters)]
Model = TypeVar("Model", bound=BaseModel)


def read_json_lines(path: Path, fix: str) -> list[tuple[str, Any]]:
    """Read the value of each line that is not blank, with its location.

    Args:
        path: the file.
        fix: the next step for the user, for messages.

    Returns:
        `(location, value)` per line; a location is `path:line number`.

    Raises:
        BadInput: the file is missing or damaged, or a line is not JSON.
    """
    rows = []
    for number, line in read_lines(path, fix):
        try:
            rows.append((f"{path}:{number}", parse_json(line)))
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
        # JSON has types: "1" is no number, and true is none
        return kind.model_validate_json(json.dumps(row), strict=True)
    except ValidationError as error:
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()  # SlicePrompt -> slice prompt
        raise BadInput(
            f"{location}: no {name} ({format_validation_errors(error)}); {fix}"
        ) from None


Value = TypeVar("Value")


def read_json_as(kind: type[Value], path: Path, made_by: str | None = None) -> Value:
    """Read a JSON file that Rondo has written, as a value of a type.

    Args:
        kind: any type that pydantic knows.
        path: the file.
        made_by: the command that makes the file, for the error message; None: `maker`.

    Raises:
        BadInput: the file is missing or damaged, or its value has another type; names the key.
    """
    fix = f"run `{made_by or maker(path)}` again"
    return check_type(kind, read_json(path, made_by), str(path), fix)


def check_type(
    kind: type[Value], value: Any, where: str, fix: str, strict: bool | None = None
) -> Value:
    """The value as a `kind`.

    Args:
        kind: any type that pydantic knows.
        value: of a file.
        where: the file, for the error message.
        fix: the next step for the user, for the error message.
        strict: whether "1" is no number, and true is none; None: as the type has it.

    Raises:
        BadInput: it has another type, or a key is missing; names the key.
    """
    try:
        checked: Value = _adapter(cast(Any, kind)).validate_python(value, strict=strict)
    except ValidationError as error:
        raise BadInput(f"{where}: {format_validation_errors(error)}; {fix}") from None
    return checked


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
