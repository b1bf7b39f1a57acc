"""Hypothesis profiles: no deadline (the first torch call is slow), the same examples every time in CI."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("laptop", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
# For tests/mutate.py: a broken function need only be noticed, so nothing is made smaller; slow is not wrong.
settings.register_profile(
    "mutants",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci" if os.environ.get("CI") else "laptop")
