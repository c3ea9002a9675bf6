"""Further columns of the sources (`prepare.columns`), which the rewards of PPO get."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.rows import Columns
from stages.lib.data.splits import prompt_key
from stages.prepare.formats import Defect, SourceRow


def read_columns(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Columns]:
    """{columns: the named values of a raw row}, None for a missing one; {} if no name is given.

    Raises:
        Defect: a value cannot be written as JSON, e.g. NaN, a date or bytes of a Parquet file.

    Example:
        >>> read_columns({"prompt": "2 + 2 =", "answer": "4"}, ["answer"])
        {'columns': {'answer': '4'}}
    """
    columns = {name: raw.get(name) for name in names}
    for name, value in columns.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError):
            raise Defect(f"`{name}` is {value!r:.40}; expected a value that JSON has") from None
    return {"columns": columns} if columns else {}


def share_columns(rows: list[SourceRow], names: Sequence[str]) -> None:
    """Give all rows with one prompt the same columns, because only one of them becomes the prompt
    that a policy is trained on: the first value of each column that is not None.

    Raises:
        BadInput: no row has one of the columns.
    """
    by_prompt: dict[str, Columns] = {}
    for row in rows:
        if "columns" in row:
            shared = by_prompt.setdefault(prompt_key(row["prompt"]), row["columns"])
            for name, value in row["columns"].items():
                if shared[name] is None:
                    shared[name] = value
            row["columns"] = shared
    for name in names:
        if by_prompt and all(columns[name] is None for columns in by_prompt.values()):
            raise BadInput(
                f"prepare.columns: no row of prepare.sources has `{name}`; correct the name"
            )
