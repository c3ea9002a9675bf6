"""The parser of a real OpenRLHF wheel, which needs neither OpenRLHF's dependencies nor a GPU: only
the `__main__` block of its command is run, with the training captured.

    python -m tests.stages.ppo.engines.openrlhf_parser openrlhf-*.whl > openrlhf.json
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

COMMAND, CONFIG = "openrlhf/cli/train_ppo_ray.py", "openrlhf/utils/config.py"


class Captured(Exception):
    """What the command has made of its arguments."""


class OpenRlhf:
    """`train_ppo_ray` of a wheel."""

    def __init__(self, wheel: Path) -> None:
        with ZipFile(wheel) as archive:
            names = {name.split("purelib/")[-1]: name for name in archive.namelist()}
            source, config = (archive.read(names[name]).decode() for name in (COMMAND, CONFIG))
        self.version = wheel.name.split("-")[1]
        main = next(
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        )
        self.code = compile(ast.Module(main.body, []), COMMAND, "exec")
        self.config = ModuleType("openrlhf.utils.config")
        exec(config, self.config.__dict__)

    def parse(self, arguments: Sequence[str]) -> Any:
        """The arguments that the training would get.

        Raises:
            SystemExit: argparse refuses them.
            AssertionError, TypeError, AttributeError: the checks after it do.
        """

        class Parser(argparse.ArgumentParser):
            def parse_args(self, *_: Any) -> Any:
                return super().parse_args(arguments)

        return self._run(Parser)

    def options(self) -> dict[str, dict[str, Any]]:
        """What the parser knows of each option, by name."""

        class Parser(argparse.ArgumentParser):
            def parse_args(self, *_: Any) -> Any:
                raise Captured(
                    {
                        name.removeprefix("--"): described(action)
                        for action in self._actions
                        for name in action.option_strings
                        if action.dest != "help"
                    }
                )

        return self._run(Parser)

    def _run(self, parser: type[argparse.ArgumentParser]) -> Any:
        def train(args: Any) -> None:
            raise Captured(args)

        names = {
            "argparse": SimpleNamespace(ArgumentParser=parser),
            "datetime": datetime,
            "train": train,
        }
        with self._modules():
            try:
                exec(self.code, names)
            except Captured as captured:
                return captured.args[0]
        raise AssertionError("the command did not reach its training")

    @contextmanager
    def _modules(self) -> Iterator[None]:
        """The modules that the block imports."""
        modules = {name: ModuleType(name) for name in ("openrlhf", "openrlhf.utils")}
        modules["openrlhf.utils.config"] = self.config
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                del sys.modules[name]


def described(action: argparse.Action) -> dict[str, Any]:
    kind = getattr(action.type, "__name__", "str")
    description: dict[str, Any] = {"type": "bool" if action.nargs == 0 else kind}
    if action.nargs:
        description["nargs"] = action.nargs
    if action.choices:
        description["choices"] = list(action.choices)
    return description


if __name__ == "__main__":
    from tests.stages.ppo.engines.record import print_record

    openrlhf = OpenRlhf(Path(sys.argv[1]))
    print_record(openrlhf.version, openrlhf.options())
