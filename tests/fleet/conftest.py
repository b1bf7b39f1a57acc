"""Fleets of every kind, the Ray ones on one cluster of virtual nodes that lasts for the session."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from needs_ray import SLOTS, needs_ray
from watching import OpenFleet

from system.fleet.local import LocalFleet
from system.fleet.ray_fleet import RayFleet
from system.world.company import make_company
from system.world.office import write_world


@pytest.fixture(scope="session")
def one_node() -> Iterator[Any]:
    """A Ray cluster: a head that takes no trials, and a node that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, while it is imported and started
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 1000, "health_check_initial_delay_ms": 1000}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quick},
        )
        cluster.add_node(num_cpus=0, resources={"trials": SLOTS})
        ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The fleet's folder."""
    return tmp_path / "scratch"


@pytest.fixture(params=["local", pytest.param("ray", marks=needs_ray)])
def open_fleet(request: pytest.FixtureRequest, scratch: Path) -> Iterator[OpenFleet]:
    """Opens a fleet of either kind."""
    if request.param == "ray":
        request.getfixturevalue("one_node")
    kind = {"local": LocalFleet, "ray": RayFleet}[request.param]
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(kind(scratch, **{"warm": (), **options}))


@pytest.fixture
def fleet(open_fleet: OpenFleet) -> Any:
    """A fleet without a warm-up."""
    return open_fleet(target="fleet_trials:run", grace_s=0.5)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A company."""
    return write_world(make_company(7, split="train"), tmp_path_factory.mktemp("company") / "world")
