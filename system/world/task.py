"""Task directories: writes ours, reads any Harbor task directory of schema 1.4 without importing Harbor.

    instruction.md   task.toml   environment/Dockerfile   environment/world/   tests/test.sh
    tests/checks.json   tests/world/   bartleby.json

environment/world, which the agent gets, and tests/world, which the grader compares with, are hard links to
one written world.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .assignment import Assignment
from .company import Company

SCHEMA_VERSION = "1.4"
_ID_LENGTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task directory as read: `Task(id="3fa9c01b2d4e", instruction="Find ...", family="find", ...)`.

    id is a hash of the directory's own files, worlds left out. world is the pristine world's folder, None if
    the directory brings none. family, split, domain are "" and level, seed are 0 without a bartleby.json. The
    expected values are not here: they stay in tests/.
    """

    id: str
    folder: Path
    instruction: str
    world: Path | None
    agent_timeout_s: float
    verifier_timeout_s: float
    family: str
    level: int
    split: str
    domain: str
    seed: int


def write_task(assignment: Assignment, company: Company, *, tasks: Path, world: Path) -> Path:
    """Writes one assignment as a task directory `tasks/<id>` and returns that folder.

    Args:
        world: the folder in which the company's world is written.

    Raises:
        ValueError: the directory exists.
    """
    files = {
        "instruction.md": assignment.instruction + "\n",
        "task.toml": _TASK_TOML.format(
            name=f"bartleby/{assignment.family}", level=assignment.level, **_about(company)
        ),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SH,
        "tests/checks.json": json.dumps(assignment.checks, indent=1) + "\n",
        "bartleby.json": json.dumps(
            {"world": company.id, "family": assignment.family, "level": assignment.level, **_about(company)},
            indent=1,
        )
        + "\n",
    }
    folder = tasks / _content_id({name: text.encode() for name, text in files.items()})
    if folder.exists():
        raise ValueError(f"task must be new, got {folder}")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "tests" / "test.sh").chmod(0o755)
    for part in ("environment", "tests"):
        shutil.copytree(world, folder / part / "world", copy_function=_link)
    return folder


def read_task(folder: Path) -> Task:
    """Reads a Harbor task directory.

    Raises:
        ValueError: a part is missing, a table or key of task.toml is unknown, or a value is out of range.
    """
    files = _own_files(folder)
    _require_parts(folder, files)
    settings = _read_toml(folder)
    about = _read_about(folder)
    world = folder / "environment" / "world"
    return Task(
        id=_content_id(files),
        folder=folder,
        instruction=files["instruction.md"].decode().strip(),
        world=world if world.is_dir() else None,
        agent_timeout_s=_seconds(folder, settings, "agent", 3600.0),
        verifier_timeout_s=_seconds(folder, settings, "verifier", 600.0),
        **about,
    )


def _about(company: Company) -> dict[str, Any]:
    return {"domain": company.domain, "split": company.split, "seed": company.seed}


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _own_files(folder: Path) -> dict[str, bytes]:
    """Relative name → content of all files but the worlds, hidden files and Python caches."""
    if not folder.is_dir():
        raise ValueError(f"task must be a directory, got {folder}")
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("world", "__pycache__") and not f.startswith(".")]
        for name in names:
            file = Path(place) / name
            if not name.startswith(".") and file.is_file():
                found[file.relative_to(folder).as_posix()] = file.read_bytes()
    return found


def _content_id(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:_ID_LENGTH]


def _require_parts(folder: Path, files: dict[str, bytes]) -> None:
    if any(name.startswith("steps/") for name in files):
        raise ValueError(f"task must have a single step, got a steps folder in {folder}")
    for name in ("instruction.md", "task.toml"):
        if name not in files:
            raise ValueError(f"task must hold {name}, got none in {folder}")
    if not files["instruction.md"].strip():
        raise ValueError(f"instruction.md must not be empty, got an empty one in {folder}")
    if "tests/test.sh" not in files:
        raise ValueError(f"task must hold tests/test.sh, got none in {folder}")


def _read_toml(folder: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"task.toml must be TOML, got {folder}: {error}") from None
    _refuse_unknown(folder, settings, _SCHEMA, "")
    version = settings.get("schema_version", settings.get("version"))
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION!r}, got {version!r} in {folder}")
    if settings.get("steps"):
        raise ValueError(f"task must have a single step, got [[steps]] in {folder}")
    image = settings.get("environment", {}).get("docker_image")
    recipes = [
        name for name in ("Dockerfile", "docker-compose.yaml") if (folder / "environment" / name).is_file()
    ]
    if not image and not recipes:
        raise ValueError(
            f"task must hold environment/Dockerfile or name a docker_image, got neither in {folder}"
        )
    return settings


def _refuse_unknown(folder: Path, table: Any, schema: Any, where: str) -> None:
    """Walks a table along its schema: a dict is a table, a list a list of tables, None anything."""
    if schema is None:
        return
    name = where or "task.toml"
    if isinstance(schema, list):
        if not isinstance(table, list):
            raise ValueError(f"{name} must be a list of tables, got {table!r} in {folder}")
        for entry in table:
            if isinstance(entry, dict) or where != "artifacts":
                _refuse_unknown(folder, entry, schema[0], where)
        return
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, got {table!r} in {folder}")
    for key, value in table.items():
        if key not in schema:
            raise ValueError(f"{name} must have only {', '.join(sorted(schema))}, got {key!r} in {folder}")
        _refuse_unknown(folder, value, schema[key], f"{where}.{key}" if where else key)


def _seconds(folder: Path, settings: dict[str, Any], table: str, default: float) -> float:
    value = settings.get(table, {}).get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{table}.timeout_sec must be positive, got {value!r} in {folder}")
    return float(value)


def _read_about(folder: Path) -> dict[str, Any]:
    empty = {"family": "", "level": 0, "split": "", "domain": "", "seed": 0}
    file = folder / "bartleby.json"
    if not file.is_file():
        return empty
    try:
        about = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"bartleby.json must be JSON, got {folder}: {error}") from None
    wanted = {"world", *empty}
    if not isinstance(about, dict) or set(about) != wanted:
        got = sorted(about) if isinstance(about, dict) else about
        raise ValueError(f"bartleby.json must have just {', '.join(sorted(wanted))}, got {got} in {folder}")
    return {key: about[key] for key in empty}


def _keys(names: str, **tables: Any) -> dict[str, Any]:
    return {**dict.fromkeys(names.split()), **tables}


_HEALTHCHECK = _keys("command interval_sec timeout_sec start_period_sec start_interval_sec retries")
_ENVIRONMENT = _keys(
    "network_mode allowed_hosts build_timeout_sec docker_image os cpus memory_mb storage_mb gpus gpu_types"
    " tpu env skills_dir workdir allow_internet memory storage",
    mcp_servers=[_keys("name transport url command args headers")],
    healthcheck=_HEALTHCHECK,
)
_AGENT = _keys("timeout_sec user network_mode allowed_hosts")
_VERIFIER = _keys(
    "timeout_sec env user environment_mode network_mode allowed_hosts",
    environment=_ENVIRONMENT,
    collect=[_keys("command service timeout_sec user")],
)
_ARTIFACTS = [_keys("source destination exclude service")]
_SCHEMA = _keys(
    "schema_version version source metadata multi_step_reward_strategy",
    artifacts=_ARTIFACTS,
    task=_keys("name version description keywords", authors=[_keys("name email")]),
    agent=_AGENT,
    verifier=_VERIFIER,
    environment=_ENVIRONMENT,
    solution=_keys("env"),
    steps=[
        _keys(
            "name min_reward",
            agent=_AGENT,
            verifier=_VERIFIER,
            healthcheck=_HEALTHCHECK,
            artifacts=_ARTIFACTS,
        )
    ],
)
"""Every table and key of a task.toml of schema 1.4. Harbor itself ignores unknown ones: a misspelt key is a
default in silence."""

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "{name}"

[metadata]
domain = "{domain}"
split = "{split}"
level = {level}
seed = {seed}

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
workdir = "/world"
"""

_DOCKERFILE = """\
# The world alone. tests/test.sh runs `python3 -m system.verify`: add Bartleby to the image for that.
FROM python:3.11-slim
RUN pip install --no-cache-dir openpyxl
COPY world /world
WORKDIR /world
"""

_TEST_SH = """\
#!/bin/sh
# Compares /world with its pristine copy in /tests/world; the final answer is in /logs/agent/answer.txt.
exec python3 -m system.verify --tests /tests --world /world \\
  --answer /logs/agent/answer.txt --reward /logs/verifier/reward.json
"""
