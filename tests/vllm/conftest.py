"""A real server of vLLM for the tests of this folder: `tests/vllm/run.sh` makes the environment that it runs in.

Without VLLM_PYTHON, the interpreter of that environment, the tests are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm_server import PYTHON, settings

from system.engine.vllm import start_vllm_engine
from system.engine.vllm.engine import VllmEngine

if not PYTHON:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """One engine for all tests: a start takes a minute."""
    handle = start_vllm_engine(settings(tmp_path_factory.mktemp("engine")))
    yield handle
    handle.close()
