"""Scoring functions that params.yaml names as `module:function`: files, import, check of results.

Imports no heavy library, so that `rondo run` can check the names before it starts.
"""

import ast
import importlib
import math
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import SupportsFloat

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.types import ScoreFunction


def import_function(named: str, key: str) -> ScoreFunction:
    """Import a scoring function that params.yaml names.

    Args:
        named: `module:function`; the module may lie in the working directory.
        key: where params.yaml names it, for the error message.

    Returns:
        The function `(prompts, responses) -> list[float]`, one number per response. Neither its
        signature nor its results are checked here; see `check_scores`.

    Raises:
        BadInput: there is no such module, or it has no such attribute.

    Example:
        >>> function = import_function("stages.lib.judging.lexicon:sentiment", "evaluate.judges")
        >>> function(["The food"], [" was wonderful."]) > function(["The food"], [" was awful."])
        True
    """
    # A script of .venv/bin, e.g. `rondo`, has its own folder on sys.path, not the working one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = named.partition(":")
    try:
        function: ScoreFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"{key}: {named} cannot be imported ({error}); put the module in the project's folder"
        ) from None
    return function


def function_files(named: str, key: str) -> list[Path]:
    """The file of a scoring function, and the project's files that it imports; none is run.

    Args:
        named: `module:function`; the module may lie in the working directory.
        key: where params.yaml names it, for the error message.

    Returns:
        Paths of the project relative to the working directory, the function's file first; of an
        installed module its absolute path alone.

    Raises:
        BadInput: there is no such module, or it is Python and not valid, or defines no such name.
    """
    module, _, name = named.partition(":")
    file = module_file(module)
    if file is None:
        file = _file_of_installed_module(module)
    if file is None:
        raise BadInput(f"{key}: {named}: no module named {module}; put it in the project's folder")
    # only an import shows what a compiled module defines
    if file.suffix == ".py" and not {name, "*"} & _defined_names(file):
        raise BadInput(f"{key}: {named}: {file} does not define {name}")
    return [file] if file.is_absolute() else imported_files(file)


def imported_files(file: Path, root: Path = Path()) -> list[Path]:
    """A file of a project and the files that it imports, at any depth; none is run.

    Args:
        file: relative to `root`.
        root: the project's folder.

    Returns:
        Paths relative to `root`, `file` first.

    Raises:
        BadInput: one of them is not valid Python.
    """
    files = [file]
    for known in files:  # which grows
        # `import a.b` also runs a/__init__.py
        packages = {folder / "__init__.py" for folder in known.parents[:-1]}
        run = direct_imports(known, root) | {path for path in packages if (root / path).is_file()}
        files += sorted(run.difference(files))
    return files


def module_file(module: str, root: Path = Path()) -> Path | None:
    """The file of a module of the project in the folder `root`, relative to it."""
    path = Path(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if (root / file).is_file()), None)


def _file_of_installed_module(module: str) -> Path | None:
    """Its file; `importlib.util.find_spec` would run the packages that contain the module."""
    parts, search, spec = module.split("."), None, None
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        search = spec.submodule_search_locations if spec else []
    return Path(spec.origin) if spec and spec.origin else None


def _defined_names(file: Path) -> set[str]:
    """The names that a module defines or imports, at any depth; `*` if it imports all names."""
    names: set[str] = set()
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise BadInput(f"{file}, line {line}: not valid Python ({reason})") from None


def direct_imports(file: Path, root: Path = Path()) -> set[Path]:
    """The project's files that a file of the project names in an import, anywhere in its code.

    Args and errors: see `imported_files`.
    """
    package = ".".join(file.parts[:-1])
    modules: set[str] = set()
    for node in ast.walk(_parse(root / file)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(file.parts) - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {path for module in modules - {""} if (path := module_file(module, root))}


def check_scores(numbers: Sequence[float], responses: int, who: str) -> None:
    """Check what a scoring function returned.

    Args:
        numbers: the result of the function.
        responses: how many responses it was given.
        who: name of the function, for the error message.

    Raises:
        RondoError: `numbers` does not have one finite number per response.
    """
    if (
        not isinstance(numbers, Sequence)
        or len(numbers) != responses
        or not all(isinstance(number, int | float) and is_finite(number) for number in numbers)
    ):
        raise RondoError(
            f"{who}: one finite number for each of {responses} responses expected, "
            f"got {numbers!r:.200}"
        )


def is_finite(number: SupportsFloat) -> bool:
    """Whether a float can hold the number, and it is neither NaN nor infinite.

    `math.isfinite` fails for an integer of more than 308 digits, which JSON can have.

    >>> is_finite(1), is_finite(math.nan), is_finite(10**400)
    (True, False, False)
    """
    try:
        return math.isfinite(number)
    except OverflowError:
        return False
