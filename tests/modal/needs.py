"""What the tests of Modal's sandbox need: its client, and what the service on loopback runs containers with."""

from __future__ import annotations

import shutil
from importlib import metadata

import pytest


def has(package: str) -> bool:
    """Whether a package is installed."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


needs_modal = pytest.mark.skipif(
    not has("modal") or shutil.which("bwrap") is None or shutil.which("nsenter") is None,
    reason="modal is not installed (pip install -e '.[modal]'), or bwrap or nsenter, which the service here runs",
)
