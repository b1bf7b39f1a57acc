"""What is left where a run is killed while it writes, or the disk is full, or another run is in its folder."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

from ablation import Arm, Config, check_same, described_rule, told_of, what_matters  # noqa: E402
from command import claim  # noqa: E402

from core.aggregate import prompt_mean_weight, token_mean_weight  # noqa: E402
from core.loss import dppo_binary_tv, importance_weighted_policy_gradient  # noqa: E402
from system.checkpoint import last_checkpoint, write_checkpoint  # noqa: E402
from system.lock import NAME, LockedError, held, holder  # noqa: E402
from system.record.metrics import JsonLines, is_torn, read_jsonl, write_json  # noqa: E402


def weights(version: int, pieces: int = 4) -> Callable[[Path], None]:
    """Writes two files, piece by piece."""

    def save(folder: Path) -> None:
        for name in ("model", "optimizer"):
            with open(folder / name, "wb", buffering=0) as file:
                for _ in range(pieces):
                    file.write(bytes([version]) * 1000)

    return save


def killed_at_call(number: int, action: Callable[[], object]) -> bool:
    """Runs an action in a process of its own that is killed at its so-manieth call into C; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = number

        def count(_frame: FrameType, event: str, _argument: Any) -> None:
            nonlocal left
            if event == "c_call":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            action()
        finally:
            sys.setprofile(None)
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_checkpoint_that_is_killed_anywhere_leaves_a_whole_one(tmp_path: Path) -> None:
    found: list[int] = []
    number, killed = 1, True
    while killed:
        root = tmp_path / str(number)
        write_checkpoint(root, 2, save=weights(2), about={})
        killed = killed_at_call(number, partial(write_checkpoint, root, 4, save=weights(4), about={}))
        last, damaged = last_checkpoint(root)
        assert last is not None and damaged == []
        assert (last.folder / "model").read_bytes() == bytes([last.version]) * 4000
        found.append(last.version)
        write_checkpoint(root, 6, save=weights(6), about={})
        assert last_checkpoint(root)[0].version == 6  # type: ignore[union-attr]
        number += 1 if number < 40 else 7
    assert found == sorted(found) and set(found) == {2, 4} and found.count(2) > 20


@pytest.mark.parametrize("place", [0, 1, 1999, 3999])
@pytest.mark.parametrize("name", ["model", "optimizer", "manifest.json"])
def test_a_byte_that_is_another_or_gone_puts_a_version_aside(tmp_path: Path, name: str, place: int) -> None:
    write_checkpoint(tmp_path, 2, save=weights(2), about={})
    folder = write_checkpoint(tmp_path, 4, save=weights(4), about={}).folder
    whole = (folder / name).read_bytes()
    place = min(place, len(whole) - 2)
    for damaged in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
        (folder / name).write_bytes(damaged)
        last, told = last_checkpoint(tmp_path)
        assert last is not None and last.version == 2
        assert len(told) == 1 and told[0].startswith("checkpoint version-000004 is left aside: ")


def test_a_version_that_the_journal_does_not_tell_of_is_left_aside(tmp_path: Path) -> None:
    for version in (2, 4):
        write_checkpoint(tmp_path, version, save=weights(version), about={})
    last, told = last_checkpoint(tmp_path, known={0, 2})
    assert last is not None and last.version == 2
    assert told == ["checkpoint version-000004 is left aside: the journal does not tell of it"]


# A full disk


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1, 50, 99, 100, 101, 150])
def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path, size: int) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as file:
        with full(size), pytest.raises(OSError, match="a line could not be written: File too large") as error:
            for number in range(100):
                file.write({"n": number, "x": "y" * 30})
        assert error.value.filename == str(path)
        kept = list(read_jsonl(path))
        assert not is_torn(path) and path.stat().st_size <= size
        file.write({"n": len(kept)})
    assert [line["n"] for line in read_jsonl(path)] == list(range(len(kept) + 1))


def test_a_value_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"old": 1})
    with full(64), pytest.raises(OSError):
        write_json(tmp_path / "summary.json", {"new": "x" * 1000})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"old": 1}
    with JsonLines(tmp_path / "lines.jsonl") as lines:
        lines.write({"x": "y" * 100})
        with full(64), pytest.raises(OSError):
            lines.rewrite(lambda line: False)
        lines.write({"x": 1})
    assert len(list(read_jsonl(tmp_path / "lines.jsonl"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.jsonl", "summary.json"]


@pytest.mark.parametrize("size", [0, 500, 3999, 4000])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path, size: int) -> None:
    write_checkpoint(tmp_path, 2, save=weights(2), about={})
    with full(size), pytest.raises(OSError):
        write_checkpoint(tmp_path, 4, save=weights(4), about={"long": "x" * 5000})
    last, damaged = last_checkpoint(tmp_path)
    assert last is not None and last.version == 2 and damaged == []
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]


# One run at a time


def test_a_folder_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    with held(tmp_path):
        assert holder(tmp_path) == str(os.getpid())
        told = f"got {tmp_path} of process {os.getpid()}"
        with pytest.raises(LockedError, match=told), held(tmp_path):
            pass
        assert holder(tmp_path) == str(os.getpid())
    assert holder(tmp_path) == "" and list(tmp_path.iterdir()) == []
    with held(tmp_path):
        pass


OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from system.lock import held
with held(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_dead_owner_does_not_block_though_its_child_lives(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(LockedError, match=f"of process {owner.pid}"), held(tmp_path):
            pass
        (tmp_path / "config.json").touch()
        with pytest.raises(ValueError, match=f"a run in it of process {owner.pid}"):
            claim(tmp_path)
        owner.kill()
        owner.wait()
        assert (tmp_path / NAME).exists() and holder(tmp_path) == ""
        with held(tmp_path):
            assert holder(tmp_path) == str(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)
        owner.kill()
        owner.stdout.close()


# What must be the same when a run goes on


def test_a_rule_is_told_with_its_bound_settings() -> None:
    loss = partial(dppo_binary_tv, max_ratio=5.0, delta_low=0.1)
    assert described_rule(loss) == "dppo_binary_tv(delta_low=0.1, max_ratio=5.0)"
    assert described_rule(prompt_mean_weight) == "prompt_mean_weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"learning_rate": 1.0}, "learning_rate was 0.00015, is 1.0"),
        ({"temperature": 0.5}, "temperature was 1.0, is 0.5"),
        ({"loss": importance_weighted_policy_gradient}, "rules was"),
        ({"weight": prompt_mean_weight}, "prompt_mean_weight"),
        ({"delta": 0.3}, "delta was 0.15, is 0.3"),
    ],
)
def test_other_settings_or_rules_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    rules = {"weight": token_mean_weight, "loss": dppo_binary_tv}
    write_json(tmp_path / "config.json", what_matters(Config(), {"a": Arm(**rules)}, {}))
    check_same(tmp_path, what_matters(Config(out=Path("elsewhere"), resume=True), {"a": Arm(**rules)}, {}))
    settings = {k: v for k, v in change.items() if k not in rules}
    own = what_matters(
        Config(**settings), {"a": Arm(**rules | {k: change[k] for k in change if k in rules})}, {}
    )
    with pytest.raises(ValueError, match="a run must go on with its own settings") as error:
        check_same(tmp_path, own)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_setting_that_there_was_not_was_at_its_default(tmp_path: Path) -> None:
    before = what_matters(Config(), {}, {})
    del before["max_ratio"]
    write_json(tmp_path / "config.json", before)
    check_same(tmp_path, what_matters(Config(), {}, {}))
    with pytest.raises(ValueError, match="max_ratio was 5.0, is 3.0"):
        check_same(tmp_path, what_matters(Config(max_ratio=3.0), {}, {}))


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"one")
    write_json(tmp_path / "config.json", what_matters(Config(policy=policy), {}, {}))
    (policy / "model.safetensors").write_bytes(b"two")
    with pytest.raises(ValueError, match="policy_files was"):
        check_same(tmp_path, what_matters(Config(policy=policy), {}, {}))


def test_lines_that_were_cut_off_and_another_commit_are_told(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"commit": "one"})
    (tmp_path / "events.jsonl").write_text('{"n":0}\n{"n":')
    (tmp_path / "metrics.jsonl").write_text('{"n":0}\n')
    assert told_of(tmp_path, "two") == [
        "the last line of events.jsonl was cut off: what it told of comes again",
        "the run was begun at commit one, and goes on at two",
    ]
    assert told_of(tmp_path, "one")[1:] == []
