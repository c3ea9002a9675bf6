"""Where code lives: who may import whom, and which folders a stage depends on (CONTRIBUTING.md).

Rooms: `stages/<stage>`, `stages/lib/<room>`, `flows/<room>`, and the files at the top of `flows/`.
"""

import ast
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo

from stages.lib.core.user_functions import direct_imports, module_file
from stages.lib.core.user_inputs import engine_code
from stages.ppo.common.resume import imported_code
from tests.paths import ROOT

# Each room of lib/ may import the rooms before it, and so may each room of flows/.
LIB = ("thresholds", "core", "metrics", "data", "dedup", "lm", "training", "judging")
FLOWS = (
    *("core", "execution", "serving", "tracking", "report", "audit", "labelling"),
    *("orchestration", "pipeline", "commands", "cli"),
)
DAG = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
FILES = sorted(
    path.relative_to(ROOT) for top in ("stages", "flows") for path in (ROOT / top).rglob("*.py")
)
STAGES = sorted(
    {path.parts[1] for path in FILES if path.parts[0] == "stages"} - {"lib", "__init__.py"}
)
MAX_LINES, MAX_FUNCTION_LINES, MAX_DOORS, MAX_FOLDERS = 600, 80, 12, 7


def room(path: Path) -> str:
    """`lib/lm`, `reward`, `flows/report`; the top's own `__init__.py` has the name of the top."""
    top, *parts = path.with_suffix("").parts
    if parts in ([], ["__init__"]):
        return top
    name = "/".join(parts[:2]) if parts[0] == "lib" else parts[0]
    return name.removesuffix("/__init__") if top == "stages" else f"flows/{name}"


@cache
def started(path: Path) -> frozenset[Path]:
    """The project's files that a file starts by the name of a module (`-m`, a fresh process)."""
    names = {
        node.value
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(stages|flows)(\.\w+){2,}", node.value)
    }
    return frozenset(file for name in names if (file := module_file(name, ROOT)))


@cache
def imports(path: Path) -> frozenset[Path]:
    """The project's files that a file imports or starts, at any depth of its code."""
    return frozenset(direct_imports(path, ROOT)) | started(path)


def rooms_of(paths: Iterable[Path]) -> set[str]:
    return {room(path) for path in paths}


@cache
def closure(start: Path) -> frozenset[Path]:
    """The files that a program runs, also in the fresh processes that it starts."""
    known, waiting = {start}, {start}
    while waiting:
        path = waiting.pop()
        packages = {folder / "__init__.py" for folder in path.parents[:-1]}
        new = (imports(path) | {path for path in packages if (ROOT / path).exists()}) - known
        known |= new
        waiting |= new
    return frozenset(known)


def program_of(name: str) -> Path:
    """The file with the `main` of a stage of dvc.yaml."""
    module = DAG[name].get("do", DAG[name])["cmd"].split()[2]
    program = module_file(module, ROOT)
    assert program is not None
    return program.with_name("__main__.py") if program.name == "__init__.py" else program


def files_run(name: str) -> set[Path]:
    """The files that a stage runs. The thresholds of gates are settings that others do not read."""
    program = program_of(name)
    is_gate = room(program) == "gate"
    return {path for path in closure(program) if is_gate or room(path) != "lib/thresholds"}


# the stage `inputs` runs every time
TRACKED_STAGES = [name for name, stage in DAG.items() if not stage.get("always_changed")]


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


@pytest.mark.parametrize("name", TRACKED_STAGES)
def test_a_stage_depends_on_the_rooms_that_it_runs(name: str) -> None:
    """DVC runs a stage again when its code changed, and only then."""
    *folders, top = code_of(name)
    used = rooms_of(files_run(name)) - {"lib", "stages"}
    assert sorted(folders) == sorted(f"stages/{name}" for name in used)
    assert len(folders) <= MAX_FOLDERS
    assert folders[0] == f"stages/{room(program_of(name))}", "its own room is the first"
    assert top == "stages/__init__.py"


def test_what_identifies_a_run_of_ppo_is_what_it_runs() -> None:
    identity = {path.relative_to(ROOT) for path in imported_code()}
    assert identity == files_run("ppo") - set(engine_code(ROOT))


def code_of(name: str) -> list[str]:
    """The dependencies of a stage that are code."""
    return [dep for dep in DAG[name].get("do", DAG[name])["deps"] if dep.startswith("stages/")]


@pytest.fixture(scope="module")
def dvc_ignores() -> Iterator[Callable[[Path], bool]]:
    """Whether .dvcignore hides a file from DVC, by DVC's own reading of it."""
    with Repo(str(ROOT)) as repo:
        yield lambda path: bool(repo.dvcignore.is_ignored_file(str(ROOT / path)))


@pytest.mark.parametrize("name", TRACKED_STAGES)
def test_dvc_hashes_what_a_stage_runs(name: str, dvc_ignores: Callable[[Path], bool]) -> None:
    """All but the files of .dvcignore, which has the reason of each."""
    run = files_run(name)
    hashed = {path for path in run if any(path.is_relative_to(dep) for dep in code_of(name))}
    assert {len(ast.parse((ROOT / path).read_text()).body) for path in run - hashed} <= {1}, (
        "a docstring alone"
    )
    ignored = {path for path in hashed if dvc_ignores(path)} - set(engine_code(ROOT))
    assert rooms_of(ignored) <= {"lib/core"}


def test_what_dvc_does_not_hash_is_there_and_the_stage_inputs_hashes_an_engines(
    dvc_ignores: Callable[[Path], bool],
) -> None:
    lines = (ROOT / ".dvcignore").read_text().splitlines()
    patterns = [line[1:] for line in lines if line.startswith("/stages/")]
    assert patterns and all(list(ROOT.glob(pattern)) for pattern in patterns)
    code = set(engine_code(ROOT))
    assert code >= {path for path in FILES if path.is_relative_to("stages/ppo/engines")}
    assert all(map(dvc_ignores, code))


CHANGES_OUTPUTS = (
    *("html", "recorder", "reading", "constitution", "champion", "rows", "files"),
    *("hub", "types", "user_functions", "fresh_process", "params/__init__", "params/policy"),
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repo]:
    """The DAG and its code in a DVC project of their own."""
    project = tmp_path_factory.mktemp("project")
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "stages", project / "stages")
    with Repo.init(str(project), no_scm=True) as repo:
        yield repo


def stages_rerun_by(edited: str, project: Repo) -> set[str]:
    """The stages that depend on code that has another hash for DVC after an edit of a file."""
    code = {dep.def_path: dep for stage in project.index.stages for dep in stage.deps}
    code = {path: dep for path, dep in code.items() if path.startswith("stages/")}
    before = {path: dep.get_hash() for path, dep in code.items()}
    with Path(project.root_dir, edited).open("a") as stream:
        stream.write("\n")
    changed = {path for path, dep in code.items() if dep.get_hash() != before[path]}
    return {name for name in TRACKED_STAGES if changed & set(code_of(name))}


@pytest.mark.parametrize("name", CHANGES_OUTPUTS)
def test_an_edit_in_core_that_can_change_outputs_reruns_all_stages(name: str, copied: Repo) -> None:
    assert stages_rerun_by(f"stages/lib/core/{name}.py", copied) == set(TRACKED_STAGES)


@pytest.mark.parametrize(
    ("edited", "stages"),
    [
        ("stages/__init__.py", set(TRACKED_STAGES)),
        ("stages/ppo/engines/verl.py", set()),
        ("stages/lib/core/errors.py", set()),
        ("stages/lib/core/progress.py", set()),
        (
            "stages/lib/thresholds/reward.py",
            {"gate_sft", "gate_reward", "gate_promote", "champion"},
        ),
        ("stages/ppo/trainer/update.py", {"ppo"}),
    ],
)
def test_an_edit_reruns_the_stages_that_run_the_code(
    edited: str, stages: set[str], copied: Repo
) -> None:
    assert stages_rerun_by(edited, copied) == stages


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "AGENTS.md"])
def test_a_page_names_what_is_in_the_files(page: str) -> None:
    """Each "`name` in `file.py`"."""
    in_file = r"`(\w+)` in\s+`((?:stages|flows|tests)/[\w/]+\.py)`"
    named = re.findall(in_file, (ROOT / page).read_text())
    assert len(named) > 5
    defined = r"^\s*(?:def|class) {0}\b|^\s*{0}\b.*="
    missing = [
        (name, file)
        for name, file in named
        if not re.search(defined.format(name), (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


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
