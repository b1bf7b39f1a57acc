"""Two layers of vLLM on the CPU would go on with the old weights after an update, in silence, without our repairs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from vllm_server import PYTHON, ROOT

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Mean gaps of logprobs to transformers', of a mixture of experts with a tied head, see `repairs.py`."""
    told = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("repairs.py")), str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=400,
        check=True,
    )
    return json.loads(told.stdout.splitlines()[-1])


def test_a_mixture_of_experts_is_exact_before_an_update_and_after(gaps: dict[str, float]):
    assert gaps["before"] < TOLERANCE and gaps["all"] < TOLERANCE


def test_a_tied_head_would_keep_the_old_embedding(gaps: dict[str, float]):
    assert gaps["tied"] > 1000 * TOLERANCE


def test_experts_would_stay_as_they_were_packed(gaps: dict[str, float]):
    assert gaps["moe"] > 1000 * TOLERANCE
