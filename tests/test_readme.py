"""README says what is: its commands exist, its files exist, its Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from readme import ROOT, SMALL, blocks, commands, experiments

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "experiments/LOG.md")


def test_the_first_two_commands_are_the_ones_that_ci_runs():
    first, second, *_ = blocks(README, "bash")
    assert first.strip() == "pip install -e . && python experiments/ablate_aggregation.py"
    assert second.strip() == "pip install -e '.[test]' && pytest"
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test," in ci and "\npytest" in ci


def test_every_command_names_a_program_and_files_that_exist():
    for words in commands(README):
        assert words[0] in ("pip", "python", "pytest", "ruff", "pyright", "bash", "cp"), words
        named = [word for word in words[1:] if "/" in word and not word.startswith("-")]
        assert all((ROOT / word).exists() for word in named if not word.startswith(("out/", "../"))), words


@pytest.mark.parametrize("words", experiments(README), ids=" ".join)
def test_every_experiment_takes_its_options_and_the_small_ones(words):
    command = [sys.executable, *words[1:], "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    given = [word for word in (*words[2:], *SMALL, "--out") if word.startswith("--")]
    assert all(option in shown.stdout for option in given)


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_every_python_block_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_local_link_and_every_path_in_backticks_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    paths = re.findall(r"`((?:core|system|experiments|tests|docs|\.ci)/[\w./-]*)`", text)
    beside = (ROOT / document).parent
    missing = [link for link in links if not (beside / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_core_function_in_the_table_exists_and_has_its_property_test():
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \|.*\| \[`\w+`\]\(([\w./]+)\) \|$", README, flags=re.MULTILINE)
    assert len(rows) >= 15
    for module, function, test in rows:
        files = [*ROOT.glob(f"core/{module}.py"), *ROOT.glob(f"core/{module}/*.py")]
        code = "".join(file.read_text(encoding="utf-8") for file in files)
        assert re.search(rf"^(def|class) {function}\b", code, flags=re.MULTILINE), (
            f"core/{module} has no {function}"
        )
        assert function in (ROOT / test).read_text(), f"{test} must test {function}"
