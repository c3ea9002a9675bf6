"""Where code lives: who may import whom, and which folders a stage depends on (CONTRIBUTING.md).

Rooms: `stages/<stage>`, `stages/lib/<room>`, `flows/<room>`, and the files at the top of `flows/`.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

# Each room of lib/ may import the rooms before it, and so may each room of flows/.
LIB = ("core", "metrics", "data", "dedup", "lm", "training", "judging")
FLOWS = (
    *("core", "execution", "serving", "tracking", "report", "orchestration", "pipeline"),
    *("commands", "cli"),
)
DAG = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
FILES = sorted(
    path.relative_to(ROOT) for top in ("stages", "flows") for path in (ROOT / top).rglob("*.py")
)
STAGES = sorted(
    {path.parts[1] for path in FILES if path.parts[0] == "stages"} - {"lib", "__init__.py"}
)
MAX_LINES, MAX_FUNCTION_LINES, MAX_DOORS, MAX_FOLDERS = 600, 80, 12, 6


def room(path: Path) -> str:
    """`lib/lm`, `reward`, `flows/report`; the top's own `__init__.py` has the name of the top."""
    top, *parts = path.with_suffix("").parts
    if parts in ([], ["__init__"]):
        return top
    name = "/".join(parts[:2]) if parts[0] == "lib" else parts[0]
    return name.removesuffix("/__init__") if top == "stages" else f"flows/{name}"


def file_of(module: str) -> Path | None:
    """The file of a module of the project, relative to the repository."""
    path = Path(*module.split("."))
    candidates = [
        file for file in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / file).exists()
    ]
    return candidates[0] if candidates else None


@cache
def imports(path: Path) -> frozenset[Path]:
    """The project's files that a file imports or starts (`-m`, a fresh process), at any depth."""
    files = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            started = re.fullmatch(r"(stages|flows)(\.\w+){2,}", node.value)
            names = [node.value] if started else []
        files |= {file_of(name) for name in names if name.startswith(("stages.", "flows."))}
    return frozenset(file for file in files if file)


def rooms_of(paths: Iterable[Path]) -> set[str]:
    return {room(path) for path in paths}


@cache
def closure(start: Path) -> frozenset[Path]:
    """The files that a program runs."""
    known, waiting = {start}, [start]
    while waiting:
        new = imports(waiting.pop()) - known
        known |= new
        waiting += new
    return frozenset(known)


def test_stages_has_few_doors() -> None:
    assert len([*STAGES, "lib"]) <= MAX_DOORS
    assert {path.name for path in (ROOT / "stages").glob("*.py")} == {"__init__.py"}
    assert {path.name for path in (ROOT / "flows").glob("*.py")} == {
        "__init__.py",
        "cli.py",
        "pipeline.py",
    }
    programs = {stage.get("do", stage)["cmd"].split()[2].split(".")[1] for stage in DAG.values()}
    assert programs == set(STAGES), "one package per DVC stage; gates and champion share one"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    own, imported = room(path), rooms_of(imports(path)) - {"stages", "flows"}
    if path.parts[0] == "flows":
        order = [f"flows/{name}" for name in FLOWS]
        below = order[: order.index(own) + 1] if own != "flows" else []
        assert {name for name in imported if name.startswith("flows")} <= set(below)
    elif own.startswith("lib/"):
        assert imported <= {
            f"lib/{name}" for name in LIB[: LIB.index(own.removeprefix("lib/")) + 1]
        }
    else:
        assert imported <= {own, *(f"lib/{name}" for name in LIB)}, (
            "no stage imports another, nor flows/"
        )


@pytest.mark.parametrize("top", ["stages", "flows"])
def test_files_import_each_other_in_no_circle(top: str) -> None:
    graph = {
        path: {other for other in imports(path) if other != path}
        for path in FILES
        if path.parts[0] == top
    }
    order = list(TopologicalSorter(graph).static_order())  # a CycleError names a circle
    assert set(order) >= set(graph)


LIB_FILES = [
    path for path in FILES if path.parts[:2] == ("stages", "lib") and path.parts[2] != "core"
]


@pytest.mark.parametrize(
    "path", [path for path in LIB_FILES if path.name != "__init__.py"], ids=str
)
def test_what_one_stage_uses_lives_with_it(path: Path) -> None:
    """At least two stages use a file of lib/, directly or not; flows/ counts as one."""
    programs = [file for file in FILES if file.parts[1] != "lib" and path in closure(file)]
    assert len({file.parts[1] if file.parts[0] == "stages" else "flows" for file in programs}) >= 2


@pytest.mark.parametrize(
    "name", [name for name, stage in DAG.items() if not stage.get("always_changed")]
)
def test_a_stage_depends_on_the_rooms_that_it_runs(name: str) -> None:
    """DVC runs a stage again when its code changed, and only then. lib/core changes no result."""
    stage = DAG[name].get("do", DAG[name])
    program = file_of(stage["cmd"].split()[2])
    assert program is not None
    program = program.with_name("__main__.py") if program.name == "__init__.py" else program
    folders = [dep for dep in stage["deps"] if dep.startswith("stages/")]
    used = rooms_of(closure(program)) - {"lib/core", "stages"}
    assert sorted(folders) == sorted(f"stages/{name}" for name in used)
    assert len(folders) <= MAX_FOLDERS
    assert folders[0] == f"stages/{room(program)}", "its own room is the first"


def test_files_and_functions_are_short() -> None:
    long = []
    for path in FILES:
        text = (ROOT / path).read_text()
        if text.count("\n") > MAX_LINES:
            long.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert long == []


ACTS = {"told", "found", "asked", "said", "theirs", "ours"}


def test_variables_are_named_after_what_they_hold() -> None:
    """Not after the act of asking (CONTRIBUTING.md)."""
    named = []
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    for path in [*FILES, *tests]:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            named += [f"{path}:{node.lineno}: {name}"] if name in ACTS else []
    assert named == []
