"""Directions and habits that a machine can hold: who may import whom, and what core never does."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import core

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted((ROOT / "core").rglob("*.py"))
SYSTEM = sorted((ROOT / "system").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

STDLIB = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"}
TORCH_FREE = {
    "__init__",
    "balance",
    "bins",
    "budget",
    "capacity",
    "check",
    "clue",
    "comparison",
    "context",
    "counter",
    "drift",
    "estimate",
    "identity",
    "ledger",
    "nearness",
    "outcome",
    "pack",
    "placement",
    "retry",
    "routing",
    "schedule",
    "staleness",
    "steps",
    "student",
    "tito",
    "triage",
}
"""What a trial process may import: it is forked many times and has no use for torch."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> list[tuple[int, str]]:
    """(level, dotted name) of every import, wherever it stands in the file."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def by_name(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda p: str(p.relative_to(ROOT)))


def test_core_is_the_folder_in_this_repository():
    assert Path(core.__file__).resolve() == ROOT / "core" / "__init__.py"


@by_name(CORE)
def test_core_imports_torch_einops_seven_stdlib_modules_and_itself_by_relative_import(path):
    for level, name in imports(path):
        top = name.split(".")[0]
        assert level in (1, len(path.relative_to(ROOT / "core").parts)) or (
            level == 0 and top in STDLIB | {"torch", "einops"}
        ), name
        assert not name.startswith("torch.distributed"), name


@by_name(CORE)
def test_core_has_no_try_no_reflection_no_output_no_globals(path):
    forbidden_calls = {"print", "getattr", "hasattr", "setattr", "open", "eval", "exec", "input", "vars"}
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.Try | ast.TryStar | ast.Global | ast.Nonlocal), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in forbidden_calls, ast.unparse(node)


@by_name(CORE)
def test_core_never_leaves_the_device_nor_draws_random_numbers(path):
    forbidden = {
        "item",
        "cpu",
        "cuda",
        "numpy",
        "tolist",
        "rand",
        "randn",
        "randint",
        "manual_seed",
        "multinomial",
    }
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in forbidden, ast.unparse(node)
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                literal = keyword.arg == "device" and isinstance(keyword.value, ast.Constant)
                assert not literal, ast.unparse(node)


@by_name(CORE)
def test_knobs_of_core_are_keyword_only_and_have_no_default(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            assert not node.args.defaults, node.name
            assert not any(node.args.kw_defaults), node.name


@by_name(CORE)
def test_every_public_thing_in_core_says_what_it_is(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), path.name
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@by_name(CORE)
def test_a_room_of_core_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 230


def test_importing_core_imports_nothing():
    assert not imports(ROOT / "core" / "__init__.py")


@by_name(SYSTEM or CORE)
def test_system_never_imports_experiments_nor_tests(path):
    for level, name in imports(path):
        assert level > 0 or name.split(".")[0] not in {"experiments", "tests"}, name


@by_name([*CORE, *SYSTEM, *TESTS])
def test_nobody_uses_jax(path):
    for _, name in imports(path):
        assert name.split(".")[0] not in {"jax", "flax", "optax"}, name


def in_a_fresh_python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trial_processes_never_see_torch():
    """Each of these imports alone, and none pulls torch in by another."""
    modules = [f"core.{name}" for name in sorted(TORCH_FREE - {"__init__"})]
    code = f"import sys\nfor m in {modules}: __import__(m)\nprint('torch' in sys.modules)"
    assert in_a_fresh_python(code, ROOT).strip() == "False"


def test_rooms_that_a_trial_runs_in_never_see_torch():
    rooms = ["trial", "fleet", "harness", "tools", "verify", "world", "sandbox"]
    present = [f"system.{room}" for room in rooms if list((ROOT / "system").glob(f"{room}*"))]
    code = f"import sys\nfor m in {present}: __import__(m)\nprint('torch' in sys.modules)"
    assert in_a_fresh_python(code, ROOT).strip() == "False"


def test_core_works_under_another_name(tmp_path):
    """It can be copied into any other framework."""
    here = tmp_path / "vendored_rl"
    shutil.copytree(ROOT / "core", here, ignore=shutil.ignore_patterns("__pycache__"))
    names = [path.stem for path in (ROOT / "core").glob("*.py") if path.stem != "__init__"] + ["schedule"]
    code = f"""
import importlib, sys
for name in {names}: importlib.import_module('vendored_rl.' + name)
assert not [m for m in sys.modules if m == 'core' or m.startswith('core.')]
import torch
from vendored_rl import aggregate, loss
mask = torch.tensor([True, True])
weight = aggregate.token_mean_weight(mask, mask.long(), mask.long(), dtype=torch.float64)
value = loss.cispo(-torch.ones(2), -torch.ones(2), torch.ones(2), mask, min_ratio=0.0, max_ratio=5.0).value
print(float((weight * value).sum()))
"""
    assert in_a_fresh_python(code, tmp_path).strip() == "1.0"
