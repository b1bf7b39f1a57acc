"""Tasks from a parquet file of the columns `path` and `task_binary`, the form in which sets of tasks are handed on."""

from __future__ import annotations

import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .archive import Limits, unpack

_GROUP_BYTES = 4 * 1024**3
_NAME_BYTES = 200


def read_parquet(path: Path, into: Path, *, limits: Limits | None = None) -> list[Path]:
    """Unpacks every row's task to `into/<its path>`, all of them or none.

    Args:
        path: the parquet file; task_binary is a gzipped tar of a task directory, other columns are left alone.
        into: made if it is not there; must hold nothing of the names in the file.
        limits: of each row; `Limits()` by default.

    Returns:
        The task folders in the order of the rows.

    Raises:
        ValueError: one line with the row, the member and the rule that it breaks.
        ImportError: pyarrow is not installed.
    """
    into.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=into))
    try:
        names: list[str] = []
        for number, (name, packed) in enumerate(_rows(path)):
            row = f"row {number}"
            names.append(_folder_name(name, row, names, into))
            if not isinstance(packed, bytes):
                raise ValueError(f"{row} must have a task_binary, got {packed!r}")
            unpack(packed, staging / names[-1], row=row, limits=limits or Limits())
            _lift(staging / names[-1], row)
        return [(staging / name).rename(into / name) for name in names]
    finally:
        shutil.rmtree(staging)


def _folder_name(name: Any, row: str, earlier: list[str], into: Path) -> str:
    plain = unicodedata.normalize("NFC", name).strip().rstrip("/") if isinstance(name, str) else ""
    odd = any(char in "/\\" or unicodedata.category(char)[0] == "C" for char in plain)
    if not plain or odd or plain.startswith(".") or len(plain.encode()) > _NAME_BYTES:
        raise ValueError(f"{row} path must be the name of one folder, got {name!r}")
    if plain in earlier:
        raise ValueError(f"{row} path must differ from those before, got {name!r}")
    if (into / plain).exists():
        raise ValueError(f"{row} path must be new in {into}, got {name!r}")
    return plain


def _lift(folder: Path, row: str) -> None:
    """Some tars hold the task's files, some a folder with them."""
    if (folder / "task.toml").is_file():
        return
    inside = list(folder.iterdir())
    if len(inside) != 1 or not (inside[0] / "task.toml").is_file():
        raise ValueError(f"{row} must hold task.toml, got {sorted(place.name for place in inside)[:8]}")
    whole = folder.with_name(f".{folder.name}")
    inside[0].rename(whole)
    folder.rmdir()
    whole.rename(folder)


def _rows(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "a parquet file of tasks needs pyarrow: pip install 'bartleby[parquet]'", name="pyarrow"
        ) from None
    try:
        with ParquetFile(path) as file:
            columns = set(file.schema_arrow.names)
            if missing := sorted({"path", "task_binary"} - columns):
                raise ValueError(
                    f"{path} must have columns path and task_binary, got none called {missing[0]}"
                )
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).total_byte_size
                if size > _GROUP_BYTES:
                    raise ValueError(
                        f"{path} must have row groups of at most {_GROUP_BYTES} bytes, got {size}"
                    )
            for batch in file.iter_batches(batch_size=1, columns=["path", "task_binary"]):
                yield from zip(batch["path"].to_pylist(), batch["task_binary"].to_pylist(), strict=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a parquet file, got {' '.join(str(error).split())}") from None
