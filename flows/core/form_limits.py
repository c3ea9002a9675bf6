"""What a run that was started in the browser may name: a form is not the person at the terminal.

Patterns of the params (stages/lib/core/params) hold for both.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from flows.core.git import git
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.project_limits import read_limits

CODE = {".py", ".pyc", ".pyd", ".so"}


def check_form(params: Params, files: list[Path]) -> None:
    """Check the files and functions that the params of a form name.

    Args:
        files: the paths of `user_files`.

    Raises:
        BadInput: a file is outside the project, or git does not track the code of a function.
    """
    data = Path(params.assets.data)  # a hub id, or a folder like a hub repository
    check_inside([*files, *([data] if data.exists() else [])])
    if code := [path for path in files if path.suffix in CODE]:
        tracked = git("ls-files", "-z", "--", *map(str, code)).split("\0")
        for path in code:
            if str(path) not in tracked:
                raise BadInput(
                    f"{path}: git does not track it, so a run that is started in the browser does "
                    f"not import it; `git add {path}`, or start the run with `rondo run`"
                )


def check_inside(paths: Iterable[Path]) -> None:
    """Check that paths are in the project's folder, or in one that pyproject.toml allows.

    A link in the project may lead out of it: a form cannot create one.

    Raises:
        BadInput: one is not; it is named.
    """
    allowed = [_absolute(folder) for folder in (Path.cwd(), *read_limits().folders)]
    for path in paths:
        if not any(_absolute(path).is_relative_to(folder) for folder in allowed):
            raise BadInput(
                f"{path} is outside the project, where a run that is started in the browser reads "
                "nothing; add its folder to [tool.rondo] folders in pyproject.toml, or start the "
                "run with `rondo run`"
            )


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))
