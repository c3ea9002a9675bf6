"""The options of an engine, as `stages/lib/core/params` records them, from the scripts here."""

import json
from collections.abc import Mapping
from typing import Any


def print_record(version: str, options: Mapping[str, Any]) -> None:
    """JSON with a line per option."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in options.items()]
    joined = ",\n".join(lines)
    print(f'{{"version": "{version}", "options": {{\n{joined}\n}}}}')
