"""Whether the tests of the Ray fleet can run here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed (pip install -e '.[ray]')"
)

SLOTS = 8
"""Trials that each of the nodes of the tests' cluster takes."""
