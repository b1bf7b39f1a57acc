"""The checkout installs as it says: what is imported is declared, what is there is shipped."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def _requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.split("\n") if line.strip()]


RUN = _requirements(_setup()["options"]["install_requires"])
TEST = _requirements(_setup()["options.extras_require"]["test"])
EXTRA = [
    requirement
    for name, text in _setup()["options.extras_require"].items()
    if name not in ("test", "test-templates", "mutation")
    for requirement in _requirements(text)
]
"""What is imported only where it is asked for."""


def _imported(*folders: str) -> set[str]:
    names: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_everything_that_is_imported_is_declared():
    declared = {canonicalize_name(requirement.name) for requirement in [*RUN, *EXTRA]}
    known = {"megatron": ["megatron-core"], **packages_distributions()}
    own = {"core", "system"} | {path.stem for path in (ROOT / "experiments").glob("*.py")}
    for module in _imported("core", "system", "experiments") - own:
        sources = {canonicalize_name(name) for name in known.get(module, [module])}
        assert sources & (declared | _CARRIED), f"setup.cfg must declare {module}, got {sorted(declared)}"


# Imported by name, brought by a declared package: pydantic and anyio are part of what mcp offers.
_CARRIED = {"anyio", "pydantic", "mcp-types", "markupsafe"}


@pytest.mark.parametrize("requirement", [*RUN, *TEST], ids=str)
def test_every_range_has_both_ends_and_holds_here(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}
    assert requirement.specifier.contains(version(requirement.name), prereleases=True)


@pytest.mark.parametrize("requirement", EXTRA, ids=str)
def test_every_range_of_an_extra_has_both_ends(requirement):
    assert {">=", "<"} <= {specifier.operator for specifier in requirement.specifier}


def test_every_extra_that_is_named_is_there():
    """pip only warns of an extra that it does not find, and the tests that need it skip."""
    texts = [ROOT / ".ci" / "run", *ROOT.glob("*.md")]
    texts += [
        path for top in ("docs", "tests") for path in (ROOT / top).rglob("*") if path.suffix in (".md", ".py")
    ]
    named = {
        name.strip()
        for path in texts
        for names in re.findall(r"install [^\n]*'\.\[([\w, -]+)\]'", path.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert {"test", "test-templates"} <= named <= set(_setup()["options.extras_require"])


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for top in ("core", "system") for path in (ROOT / top).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_file_beside_the_code_is_package_data():
    patterns = re.split(r"[,\s]+", _setup()["options.package_data"]["*"])
    files = [path for top in ("core", "system") for path in (ROOT / top).rglob("*") if path.is_file()]
    other = [path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts]
    assert other and all(any(path.match(pattern) for pattern in patterns) for path in other)


def test_system_refuses_a_core_that_is_not_beside_it(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", "import system"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "another distribution ships a package named core" in done.stderr
