"""Every public function of core is called in an oracle test: read from the sources, not from a list."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parent.parent / "core"


def public_functions() -> list[tuple[str, str]]:
    """(module, name) of the functions that a module of core defines without a leading underscore."""
    found = []
    for path in sorted(CORE.rglob("*.py")):
        module = ".".join(path.relative_to(CORE.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found.append((module, node.name))
    return found


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """What a test imports from core: its local name to (module, name)."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "core"
        for alias in node.names
    }


def used(tree: ast.Module) -> set[str]:
    """Names that a test reads outside its imports."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@cache
def covered() -> set[tuple[str, str]]:
    """Imported from core and read, in some oracle test; through `core.schedule` too."""
    found = set()
    for path in HERE.glob("test_*_oracle.py"):
        tree = ast.parse(path.read_text())
        names = used(tree)
        found |= {origin for name, origin in imported(tree).items() if name in names}
    return found


@pytest.mark.parametrize("module", sorted({module for module, _ in public_functions()}))
def test_every_public_function_has_an_oracle(module: str) -> None:
    have = covered()
    package = module.rsplit(".", 1)[0]
    missing = [
        name
        for home, name in public_functions()
        if home == module and (home, name) not in have and (package, name) not in have
    ]
    assert not missing, f"tests/oracle must call {', '.join(f'{module}.{name}' for name in missing)}"


def test_no_oracle_takes_its_formula_from_core() -> None:
    for path in HERE.glob("oracle_*.py"):
        modules = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        from_core = {one for one in modules if one.split(".")[0] == "core"}
        allowed = {"core.schedule", "core.counter"} if path.name == "oracle_schedule.py" else set()
        assert from_core <= allowed and "torch" not in modules
