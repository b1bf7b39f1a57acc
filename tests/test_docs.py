"""docs/core.md says what is: every public function of core, and only laws that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from readme import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "core.md", DOCS / "porting.md"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#]+)\)")
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


class Line(NamedTuple):
    """A line of a table, under the heading of its file."""

    file: str
    function: str
    formula: str
    paper: str
    laws: list[tuple[str, str]]


def lines() -> list[Line]:
    found: list[Line] = []
    file = ""
    for line in (DOCS / "core.md").read_text(encoding="utf-8").splitlines():
        heading = re.match(r"### \[(\w+)\]", line)
        file = heading[1] if heading else file
        if line.startswith("| `"):
            function, formula, paper, laws = (cell.strip() for cell in line.strip("|").split("|"))
            pairs = [(name.strip("`"), target) for name, target in LINK.findall(laws)]
            found.append(Line(file, function.strip("`"), formula, paper, pairs))
    return found


LINES = lines()


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """What a file defines, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@cache
def words(path: Path) -> set[str]:
    """Every name that a file reads, and every text in it that might be one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.Name(id=name)
                | ast.alias(name=name)
                | ast.Attribute(attr=name)
                | ast.Constant(value=str(name))
            ):
                found.add(name)
    return found


def files() -> dict[str, list[Path]]:
    """The files of core by the name of their heading; a folder is one heading."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "core").rglob("*.py")):
        found.setdefault(path.relative_to(ROOT / "core").parts[0].removesuffix(".py"), []).append(path)
    return found


def public() -> dict[tuple[str, str], ast.FunctionDef]:
    """(file, function) of everything in core that a name with an underscore does not hide."""
    return {
        (file, name): node
        for file, paths in files().items()
        for path in paths
        for name, node in functions(path).items()
        if not name.startswith("_")
    }


def test_every_public_function_of_core_stands_once_under_its_file_and_no_other_does():
    written = [(line.file, line.function) for line in LINES]
    lacking = [f"core.{file}.{name}" for file, name in public() if (file, name) not in written]
    assert not lacking, f"docs/core.md must have a line for {', '.join(lacking)}"
    strays = [f"core.{file}.{name}" for file, name in written if (file, name) not in public()]
    assert not strays, f"docs/core.md must not have a line for {', '.join(strays)}, which core does not have"
    twice = {f"core.{file}.{name}" for file, name in written if written.count((file, name)) > 1}
    assert not twice, f"docs/core.md must have one line only for {', '.join(twice)}"


def test_every_function_says_what_it_computes_in_one_line():
    silent = [f"core.{line.file}.{line.function}" for line in LINES if not line.formula]
    assert not silent, f"docs/core.md must say what is computed by {', '.join(silent)}"


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.file}.{line.function}")
def test_every_law_is_a_test_of_the_file_it_links_to_which_uses_the_function(line):
    assert line.laws, f"docs/core.md must name a law of core.{line.file}.{line.function}"
    for name, target in line.laws:
        path = DOCS / target
        assert name in functions(path), f"{target} has no {name}"
        assert line.function in words(path), f"{target} never uses {line.function}"


def test_papers_that_a_docstring_names_are_in_its_line():
    for (file, name), node in public().items():
        (line,) = [line for line in LINES if (line.file, line.function) == (file, name)]
        missing = set(ARXIV.findall(ast.get_docstring(node) or "")) - set(ARXIV.findall(line.paper))
        assert not missing, f"{file}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_paper_is_linked_by_its_number(page):
    for text, target in LINK.findall(page.read_text(encoding="utf-8")):
        if "arxiv.org" in target:
            assert target == f"https://arxiv.org/abs/{text}" and ARXIV.fullmatch(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_path_in_backticks_leads_to_a_file(page):
    text = page.read_text(encoding="utf-8")
    links = [target for _, target in LINK.findall(text) if "://" not in target]
    paths = re.findall(r"`((?:core|system|experiments|tests|docs)/[\w./-]*)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert links and not missing + [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_core_in_the_text_exists(page):
    named = re.findall(r"`core\.(\w+)\.(\w+)`", page.read_text(encoding="utf-8"))
    assert all(pair in public() for pair in named)
