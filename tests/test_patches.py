"""Changes of other libraries' objects: each is listed with its upstream issue, and none is added
unseen.
"""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

# File and target: the issue, or the pull request, upstream
PATCHES = {
    (
        "stages/lib/training/trl_setup.py",
        "chunked_logprob.TOKEN_CHUNK_SIZE",
    ): "huggingface/trl#7244",
    ("stages/lib/training/trl_setup.py", "trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE"): (
        "huggingface/trl#7244"
    ),
    ("stages/lib/training/trl_setup.py", "trl_utils._use_triton"): "huggingface/trl#7244",
    # Accelerate makes batches of equal size, so that two processes do not give what one gives
    ("stages/lib/training/trl_setup.py", "accelerator.gather"): "huggingface/accelerate#781",
    ("stages/lib/training/trl_setup.py", "accelerator.gather_for_metrics"): (
        "huggingface/accelerate#781"
    ),
    ("stages/lib/training/trl_setup.py", "accelerator.reduce"): "huggingface/accelerate#781",
    # Experimental in peft, and documented
    ("stages/lib/lm/lora.py", "config._register_custom_module"): "huggingface/peft#1867",
}
OWN = {"flows", "stages", *sys.stdlib_module_names}


def root(node: ast.expr) -> str:
    """The name at the start of `name.a.b`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names of a file's foreign modules and classes, and of their instances among annotated
    arguments and variables; with the variables that are made of each.
    """
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {
                alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: node.module or "" for alias in node.names}
        else:
            continue
        imported |= {name for name, module in names.items() if module.partition(".")[0] not in OWN}
    instances = {
        node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation and root(node.annotation) in imported
    } | {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and root(node.annotation) in imported
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Name | ast.Attribute
        ):
            variables = {target.id for target in targets(node) if isinstance(target, ast.Name)}
            for known in (imported, instances):
                if root(node.value) in known:
                    known |= variables
    return imported, instances


def targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def patches(code: str) -> Iterator[str]:
    """What a file changes in foreign modules and classes; foreign objects of which it replaces a
    method; private names of foreign code that it calls to register something.
    """
    tree = ast.parse(code)
    imported, instances = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            replaces = isinstance(node.value, ast.Lambda) or (
                isinstance(node.value, ast.Attribute) and root(node.value) == "self"
            )
            known = imported | instances if replaces else imported
            for target in targets(node):
                if isinstance(target, ast.Attribute) and root(target) in known:
                    yield ast.unparse(target)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "setattr" and root(node.args[0]) in imported:
                yield ast.unparse(node)
            if "._register" in called and not called.startswith("self"):
                yield called


def test_no_patch_is_unlisted() -> None:
    all_patches = {
        (str(path.relative_to(ROOT)), patch)
        for room in ("flows", "stages")
        for path in (ROOT / room).rglob("*.py")
        for patch in patches(path.read_text("utf-8"))
    }
    assert all_patches == set(PATCHES)


@pytest.mark.parametrize(
    ("code", "patch"),
    [
        ("from prefect import flow_engine\nengine: Any = flow_engine\nengine.x = 1", "engine.x"),
        ("import trl.kernels as k\nk.SIZE += 2", "k.SIZE"),
        ("from trl import A\nsetattr(A, 'x', 1)", "setattr(A, 'x', 1)"),
        ("from trl import A\ndef f(self, a: A):\n    b = a.c\n    b.d = self.e", "b.d"),
        ("from trl import A\ndef f(self):\n    a: A = self.a\n    a.b = self.c", "a.b"),
        ("from trl import A\ndef f(a: A):\n    a.value = 1", None),
        ("import os\nos.x = 1", None),
    ],
)
def test_a_patch_is_seen(code: str, patch: str | None) -> None:
    assert list(patches(code)) == ([patch] if patch else [])
