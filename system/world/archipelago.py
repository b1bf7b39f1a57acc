"""archipelago.json: what an Archipelago task says of its world's image, its keys and its snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TEXTS = ("task_id", "task_slug", "world_id", "ecr_image")
_KEYS = {*_TEXTS, "task_name", "world_short_name", "required_env_keys", "needs_snapshot"}
_OF_A_RUBRIC = {"rubric", "scoring", "batched"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Archipelago:
    """`Archipelago(task_id="t1", world_id="w7", ecr_image="1.dkr.ecr.us-east-1.amazonaws.com/w7:v1", ...)`.

    Many tasks share the image of one world. required_env_keys names variables that the image's servers want to find
    set. needs_snapshot says that grading compares the world with how it was at the start. task_name and
    world_short_name are for people, "" if the file has none.
    """

    task_id: str
    task_name: str
    task_slug: str
    world_id: str
    world_short_name: str
    ecr_image: str
    required_env_keys: tuple[str, ...]
    needs_snapshot: bool


def archipelago(table: dict[str, Any]) -> Archipelago:
    """The content of an archipelago.json; a rubric may stand beside it and is not looked at here.

    A file without needs_snapshot needs one, as the recipe's agent takes it; one without required_env_keys needs none.

    Raises:
        ValueError: a key is unknown or missing, or a value is of another kind.
    """
    if unknown := sorted(set(table) - _KEYS - _OF_A_RUBRIC):
        raise ValueError(f"archipelago.json must have only {', '.join(sorted(_KEYS))}, got {unknown[0]!r}")
    for key in _TEXTS:
        value = table.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key} of archipelago.json must be a text, got {value!r}")
    names = {key: table.get(key, "") for key in ("task_name", "world_short_name")}
    for key, value in names.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} of archipelago.json must be a text, got {value!r}")
    variables = table.get("required_env_keys", [])
    if not isinstance(variables, list) or not all(isinstance(v, str) and v.isidentifier() for v in variables):
        raise ValueError(
            f"required_env_keys of archipelago.json must be names of variables, got {variables!r}"
        )
    needs_snapshot = table.get("needs_snapshot", True)
    if not isinstance(needs_snapshot, bool):
        raise ValueError(f"needs_snapshot of archipelago.json must be true or false, got {needs_snapshot!r}")
    return Archipelago(
        **{key: table[key] for key in _TEXTS},
        **names,
        required_env_keys=tuple(variables),
        needs_snapshot=needs_snapshot,
    )
