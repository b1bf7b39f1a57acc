"""Whatever breaks around a trial: the outcome is the right one, no reward is invented, and nothing is left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from fault_stage import HERE, Fault, Stage, differences
from fault_table import FAULTS, table
from random_faults import play_all

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bwrap is not installed (apt install bubblewrap)"
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One stage for all faults."""
    with Stage(tmp_path_factory.mktemp("s")) as stage:
        yield stage


def test_names_differ_and_there_are_more_than_forty():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 40


def test_no_system_error_is_expected_to_have_a_reward():
    assert not [
        f.name for f in FAULTS if f.then.kind in ("system_error", "cancelled") and f.then.reward is not None
    ]


def test_the_table_that_is_kept_is_that_of_the_faults():
    """`python tests/faults/fault_table.py > tests/faults/recorded/faults.md` makes it again."""
    assert (HERE / "recorded" / "faults.md").read_text() == table()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_the_right_outcome_and_leaves_nothing(stage: Stage, fault: Fault):
    result = stage.play(fault)
    assert differences(fault, result) == []
    assert result["left"] == {}


def test_faults_at_random_are_never_mistaken_for_the_policy_nor_it_for_them(stage: Stage):
    """The same with a thousand trials: `python tests/faults/random_faults.py`, its report in recorded/1000.json."""
    report = play_all(stage, trials=60, seed=1, side_by_side=4)
    assert report.record["wrong_in_anything"] == []
    assert report.clean, report.record
    assert sum(report.confusion.values()) == 60 and report.confusion["policy", "policy"] >= 20
