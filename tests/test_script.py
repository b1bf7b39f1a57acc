"""A foreign test script: it grades a copy in a place of its own, and only its numbers come back."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.sandbox.frozen import FrozenWorld
from system.verify import Verdict, VerifyError, verify
from system.verify.script import ScriptLimits, read_rewards, run_script

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def world(tmp_path: Path) -> FrozenWorld:
    for name in ("before", "after"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "fees.csv").write_text("alpha,40\n")
    (tmp_path / "after" / "out.csv").write_text("alpha,48\n")
    os.symlink("/etc/passwd", tmp_path / "after" / "link")
    os.mkfifo(tmp_path / "after" / "pipe")
    return FrozenWorld(lower=tmp_path / "before", root=tmp_path / "after")


def run(script: str, world: FrozenWorld, *, seconds: float = 20.0, **more) -> Verdict:
    tests = world.lower.parent / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(script)
    (tests / "expected.txt").write_text("48\n")
    scratch = world.lower.parent / "scratch"
    try:
        limits = ScriptLimits(seconds=seconds, stop_s=5.0, memory_bytes=512 << 20)
        return run_script(tests, world, "the answer", scratch_root=scratch, limits=limits, **more)
    finally:
        assert not scratch.exists() or os.listdir(scratch) == []


def failing(script: str, world: FrozenWorld, **more) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        run(script, world, **more)
    return caught.value


@needs_bubblewrap
def test_a_script_sees_tests_world_and_answer_and_its_numbers_are_the_verdict(world: FrozenWorld):
    verdict = run(
        '#!/bin/sh\nset -e\n[ "$(pwd)" = /world ]\ngrep -q alpha,40 sub/fees.csv\n'
        'grep -q "$(cat /tests/expected.txt)" out.csv\n[ "$(cat /logs/agent/answer.txt)" = \'the answer\' ]\n'
        "[ ! -e link ] && [ ! -e pipe ]\n"
        'echo \'{"reward": 0.5, "found": 1}\' > /logs/verifier/reward.json\n',
        world,
    )
    assert verdict.reward == 0.5 and not verdict.passed
    assert [(c.name, c.met, c.gate) for c in verdict.criteria] == [
        ("reward", False, False),
        ("found", True, False),
    ]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 1 > /logs/verifier/reward.txt", 1.0),
        ("echo 0.25 > /logs/verifier/reward.txt; exit 7", 0.25),
        ("echo 0 > /logs/verifier/reward.txt", 0.0),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt", 1.0),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(script: str, reward: float, world: FrozenWorld):
    """reward.json before reward.txt; the exit code is not asked, and told."""
    verdict = run(script, world)
    assert verdict.reward == reward and verdict.passed == (reward == 1.0)
    assert verdict.criteria[0].detail.endswith("exit 7" if "exit 7" in script else "exit 0")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("script", "cause", "text"),
    [
        ("exit 0", "reward_missing", "exit 0"),
        ("echo it broke >&2; exit 3", "reward_missing", "exit 3; it broke"),
        ("kill -9 $$", "reward_missing", "exit 137"),
        (": > /logs/verifier/reward.json", "reward_unreadable", "must not be empty"),
        ("echo '{' > /logs/verifier/reward.json", "reward_unreadable", "finite numbers"),
        ("echo '[1]' > /logs/verifier/reward.json", "reward_unreadable", "finite numbers"),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", "reward_unreadable", "finite numbers"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "reward_unreadable", "finite numbers"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "reward_unreadable", "must hold a reward"),
        ("echo pass > /logs/verifier/reward.txt", "reward_unreadable", "finite numbers"),
        ("echo inf > /logs/verifier/reward.txt", "reward_unreadable", "finite numbers"),
        ("echo 37 > /logs/verifier/reward.txt", "reward_unreadable", "between 0 and 1, got 37"),
        ("echo -0.5 > /logs/verifier/reward.txt", "reward_unreadable", "between 0 and 1, got -0.5"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "reward_unreadable", "bytes at most"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "reward_unreadable", "plain file"),
        ("mkfifo /logs/verifier/reward.txt", "reward_unreadable", "plain file"),
        ("mkdir /logs/verifier/reward.json", "reward_unreadable", "plain file"),
    ],
)
def test_a_reward_that_is_not_there_or_not_one_is_a_system_error_and_never_a_zero(
    script: str, cause: str, text: str, world: FrozenWorld
):
    error = failing(script, world)
    assert error.cause == cause and text in error.detail


@needs_bubblewrap
@pytest.mark.parametrize("script", ["sleep 60", "while :; do :; done", "setsid sleep 60 & sleep 60", "yes"])
def test_a_script_that_does_not_end_is_killed_with_all_that_it_started(script: str, world: FrozenWorld):
    begun = time.monotonic()
    forged = "echo 1 > /logs/verifier/reward.txt\n"
    assert failing(forged + script, world, seconds=1.0).cause == "script_timeout"
    assert time.monotonic() - begun < 5.0


@needs_bubblewrap
def test_a_background_writer_is_dead_before_the_reward_is_read(world: FrozenWorld):
    """Harbor's shared mode pays it (facts 1.8): here the reward is what stood there when everything was dead."""
    writer = "(trap '' HUP TERM; while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &\n"
    verdict_or_error = []
    for _ in range(3):
        script = f"{writer}sleep 0.2; echo '{{\"reward\": 0}}' > /logs/verifier/reward.json; exit 0"
        verdict_or_error.append(run(script, world).reward)
    assert verdict_or_error == [0.0, 0.0, 0.0]


@needs_bubblewrap
def test_a_process_that_keeps_the_output_open_delays_nothing(world: FrozenWorld):
    begun = time.monotonic()
    assert run("sleep 30 & echo 1 > /logs/verifier/reward.txt", world).reward == 1.0
    assert time.monotonic() - begun < 5.0


@needs_bubblewrap
def test_what_lay_there_before_does_not_count(world: FrozenWorld, tmp_path: Path):
    """The agent may have left a reward in its world; the place of the reward is new."""
    (tmp_path / "after" / "logs" / "verifier").mkdir(parents=True)
    (tmp_path / "after" / "logs" / "verifier" / "reward.txt").write_text("1")
    (tmp_path / "after" / "reward.json").write_text('{"reward": 1}')
    assert failing("exit 0", world).cause == "reward_missing"


@needs_bubblewrap
def test_a_script_has_no_network_no_host_files_and_no_key(
    world: FrozenWorld, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY_1", "sk-secret")
    script = (
        'n=0\n[ -z "$(env | grep -i secret)" ] && n=$((n+1))\n'
        f"[ ! -e {Path(__file__).parents[1] / 'setup.cfg'} ] && [ ! -e /etc/passwd ] && n=$((n+1))\n"
        "[ \"$(ls /sys/class/net 2>/dev/null)\" = '' ] && n=$((n+1))\n"
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 1)' 2>/dev/null || n=$((n+1))\n"
        "touch /tests/x 2>/dev/null || n=$((n+1))\n"
        "touch /logs/agent/x 2>/dev/null || n=$((n+1))\n"
        '[ "$(ls -d /proc/[0-9]* | wc -l)" -lt 10 ] && n=$((n+1))\n'
        'echo "{\\"reward\\": 1, \\"refused\\": $n}" > /logs/verifier/reward.json\n'
    )
    assert run(script, world).criteria[1].detail == "7, exit 0"


@needs_bubblewrap
def test_what_the_script_does_to_its_copy_stays_there(world: FrozenWorld, tmp_path: Path):
    run("rm -rf /world/sub; echo x > /world/out.csv; echo 1 > /logs/verifier/reward.txt", world)
    assert (tmp_path / "after" / "out.csv").read_text() == "alpha,48\n"
    assert (tmp_path / "after" / "sub" / "fees.csv").exists() and (tmp_path / "tests" / "test.sh").exists()


@needs_bubblewrap
def test_a_script_is_kept_within_memory_and_file_size(world: FrozenWorld):
    grown = "python3 -c 'bytearray(900 << 20)' 2>/dev/null || echo 1 > /logs/verifier/reward.txt"
    assert run(grown, world).reward == 1.0
    written = "head -c 100M /dev/zero > /world/big 2>/dev/null || echo 1 > /logs/verifier/reward.txt"
    assert run(written, world).reward == 1.0


@needs_bubblewrap
def test_much_output_is_read_and_only_its_end_told(world: FrozenWorld):
    error = failing("yes noise | head -c 20000000; echo the end", world)
    assert error.detail.endswith("the end") and len(error.detail) < 400


@needs_bubblewrap
def test_a_world_too_large_to_copy_is_a_system_error(world: FrozenWorld, tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("exit 0")
    with pytest.raises(VerifyError, match="the world must have 5 bytes at most, got more"):
        run_script(
            tmp_path / "tests",
            world,
            "",
            scratch_root=tmp_path / "scratch",
            limits=ScriptLimits(world_bytes=5),
        )
    assert os.listdir(tmp_path / "scratch") == []


@needs_bubblewrap
def test_a_foreign_task_is_graded_by_its_script_with_its_own_settings(world: FrozenWorld, tmp_path: Path):
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    script = '[ "$(pwd)" = /data/work ] && [ "$LIMIT" = 48 ] && echo 1 > /logs/verifier/reward.txt'
    (task / "tests" / "test.sh").write_text(script)
    toml = '[verifier]\ntimeout_sec = 20.0\nenv = {LIMIT = "48"}\n[environment]\nworkdir = "/data/work"\n'
    (task / "task.toml").write_text(toml)
    assert verify(task, world, "", scratch_root=tmp_path / "scratch").passed
    (task / "task.toml").write_text('[verifier]\nenv = {KEY = "${JUDGE_KEY_1}"}\n')
    with pytest.raises(
        VerifyError, match="^task: a test script gets nothing of the host's environment, got KEY"
    ):
        verify(task, world, "", scratch_root=tmp_path / "scratch")


@pytest.mark.parametrize("workdir", ["world", "/", "/a/../b", "/tests"])
def test_a_workdir_that_is_no_place_of_its_own_is_refused(workdir: str, world: FrozenWorld):
    assert failing("exit 0", world, workdir=workdir).cause == "task"


def test_no_bubblewrap_is_a_system_error(world: FrozenWorld, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert failing("exit 0", world).cause == "sandbox"


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=True, allow_infinity=True), max_size=3))
def test_only_finite_numbers_are_a_reward(rewards: dict[str, float]):
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "reward.json").write_text(json.dumps(rewards))
        if rewards and all(abs(value) < float("inf") for value in rewards.values()):
            assert read_rewards(Path(name)) == rewards
        else:
            with pytest.raises(VerifyError, match="reward_unreadable"):
                read_rewards(Path(name))
