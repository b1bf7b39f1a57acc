"""task.toml of schema 1.4: every table and key it may have; unknown ones are refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

SCHEMA_VERSION = "1.4"


def read_settings(folder: Path) -> dict[str, Any]:
    """The tables of a task directory's task.toml.

    Raises:
        ValueError: no TOML, another schema version, an unknown table or key, or no image and no way to build one.
    """
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"task.toml must be TOML, got {folder}: {error}") from None
    _refuse_unknown(folder, settings, _SCHEMA, "")
    version = settings.get("schema_version", settings.get("version"))
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION!r}, got {version!r} in {folder}")
    image = settings.get("environment", {}).get("docker_image")
    recipes = [
        name for name in ("Dockerfile", "docker-compose.yaml") if (folder / "environment" / name).is_file()
    ]
    if not image and not recipes:
        raise ValueError(
            f"task must hold environment/Dockerfile or name a docker_image, got neither in {folder}"
        )
    return settings


def seconds(table: dict[str, Any], where: str, default: float, folder: Path) -> float:
    """timeout_sec of a table that stands at `where`, the default if it has none."""
    value = table.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}.timeout_sec must be positive, got {value!r} in {folder}")
    return float(value)


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
