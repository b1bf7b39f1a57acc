"""What a sandbox promises, tried from inside with the tools that an agent has."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from system.fleet.local import LocalFleet
from system.sandbox import FrozenWorld, Limits, SandboxError, choose_sandbox, open_sandbox
from system.world.company import make_company
from system.world.office import write_world

REPOSITORY = Path(__file__).parents[1]
KINDS = ("bubblewrap", "process")
SECRET = "the answer is 4821"

Trial = Callable[..., dict[str, Any]]

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bwrap is not installed (apt install bubblewrap)"
)
both_kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_bubblewrap if kind == "bubblewrap" else ()) for kind in KINDS]
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task folder: a world, and beside it what the agent must not see."""
    folder = tmp_path_factory.mktemp("a task, with: odd name")
    write_world(make_company(7, split="train"), folder / "world")
    (folder / "world" / "old").mkdir()
    (folder / "world" / "old" / "a.txt").write_text("a")
    (folder / "world" / "old" / "b.txt").write_text("b")
    (folder / "tests").mkdir()
    (folder / "tests" / "checks.json").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def trial(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Runs an action of sandbox_trials.py in a process of the fleet, as a trial does."""
    scratch = tmp_path_factory.mktemp("scratch")
    os.environ["BARTLEBY_TEST_SECRET"] = SECRET
    with LocalFleet(scratch, target="sandbox_trials:run") as fleet:
        counter = iter(range(10_000))

        def run(action: str, kind: str, **spec: Any) -> dict[str, Any]:
            spec |= {"action": action, "kind": kind, "world": f"{task}/world", "scratch": f"{scratch}"}
            fleet.start({"trial_id": f"trial {next(counter)}", "deadline_s": 40, **spec})
            results = fleet.poll(60)
            assert len(results) == 1
            outcome = results[0].get("outcome")
            assert outcome is None, f"{outcome}\n{fleet.log.read_text()[-3000:]}"
            assert os.listdir(scratch) == ["fleet.log"], "a folder is left"
            return results[0]

        yield run
    del os.environ["BARTLEBY_TEST_SECRET"]


def code(text: str) -> list[Any]:
    """A call of the code tool."""
    return ["run_code", {"code": text}]


def attempts(expressions: list[str]) -> list[Any]:
    """A call that tries each expression and prints `reached` and the value, or the name of the error."""
    return code(
        "import os, socket, pathlib, ctypes\n"
        f"for one in {expressions!r}:\n"
        "    try: print('reached', one, eval(one))\n"
        "    except BaseException as error: print('refused', type(error).__name__)\n"
    )


@needs_bubblewrap
def test_tools_read_neither_the_tests_nor_home_nor_the_repository(trial: Trial, task: Path) -> None:
    hidden = [task / "tests/checks.json", task / "world", REPOSITORY / "setup.cfg", REPOSITORY / "system"]
    hidden += [Path.home() / ".bashrc", Path("/etc/passwd"), Path("/etc/shadow"), Path("/var"), Path("/sys")]
    tries = [f"os.stat({os.fspath(path)!r})" for path in hidden]
    tries += [f"os.listdir({os.path.expanduser('~')!r} + '/.ssh')", "open('/proc/1/root/etc/passwd').read()"]
    tries += [f"open('/proc/self/root{task}/tests/checks.json').read()"]
    escape = ["read_file", {"path": "../etc/hosts"}]
    result = trial("use_tools", "bubblewrap", calls=[attempts(tries), escape])
    assert "reached" not in result["answers"][0]
    assert result["answers"][0].count("refused") == len(tries)
    assert result["answers"][1].startswith("error: ")


@needs_bubblewrap
def test_no_socket_reaches_the_host(trial: Trial, tmp_path: Path) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        name = f"\0bartleby-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        tries = [
            f"socket.create_connection({tcp.getsockname()!r}, 2)",
            "socket.create_connection(('1.1.1.1', 53), 2)",
            f"socket.socket(socket.AF_UNIX).connect({name!r}) or 1",
            "socket.socket(socket.AF_VSOCK)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        ]
        devices = code("print([line.split(':')[0].strip() for line in list(open('/proc/net/dev'))[2:]])")
        result = trial("use_tools", "bubblewrap", calls=[attempts(tries), devices])
    assert result["answers"][0].count("refused") == len(tries), result["answers"][0]
    assert result["answers"][1] == "['lo']"


@both_kinds
def test_environment_variables_of_the_host_do_not_show(trial: Trial, kind: str) -> None:
    look = code(
        "import glob, os\n"
        "texts = [repr(dict(os.environ))]\n"
        "for path in ['/proc/self/environ', f'/proc/{os.getppid()}/environ', f'/proc/{os.getppid()}/mem']:\n"
        "    try: texts.append(open(path, 'rb').read(1 << 20).decode('latin-1'))\n"
        "    except OSError: texts.append('refused')\n"
        "print('BARTLEBY' in repr(texts), '4821' in repr(texts), 'PYTHONPATH' in repr(texts))\n"
    )
    peer = attempts(
        ["os.readlink(f'/proc/{os.getppid()}/fd/3')", "open(f'/proc/{os.getppid()}/maps').read()"]
    )
    answers = trial("use_tools", kind, calls=[look, peer])["answers"]
    assert answers == ["False False False", "refused PermissionError\nrefused PermissionError"]


@needs_bubblewrap
def test_tools_have_no_privileges_and_gain_none(trial: Trial) -> None:
    status = code(
        "lines = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines())\n"
        "print(int(lines['CapEff'], 16), int(lines['CapBnd'], 16), lines['NoNewPrivs'], lines['Seccomp'])\n"
        "import os; print(os.getuid(), os.getgid())\n"
    )
    tries = [
        "open('/usr/bin/x', 'w')",
        "open('/x', 'w')",
        "open('/dev/x', 'w')",
        "open('/etc/x', 'w')",
        "open('/proc/sys/kernel/pid_max', 'w').write('400')",
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "open('/proc/self/oom_score_adj', 'w')",
        "os.chroot('/tmp')",
        "os.kill(1, 9) or os.stat('/proc/1') and 1/0",
        f"open({sys.prefix!r} + '/lib/x', 'w')",
        "1/(ctypes.CDLL(None).unshare(0x10000000) + 1)",
        "1/(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) + 1)",
        "1/(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) + 1)",
    ]
    result = trial("use_tools", "bubblewrap", calls=[status, attempts(tries)])
    assert result["answers"][0] == "0 0 1 2\n1000 1000"
    assert "reached" not in result["answers"][1], result["answers"][1]


@both_kinds
def test_memory_and_file_size_are_limited(trial: Trial, kind: str) -> None:
    limits = {"memory_bytes": 200 << 20, "file_bytes": 1 << 20}
    tries = ["len(bytearray(900 << 20))", "open('big', 'wb').write(bytes(2 << 20)) == 2 << 20 or 1/0"]
    result = trial("use_tools", kind, limits=limits, calls=[attempts(tries)])
    assert "reached" not in result["answers"][0], result["answers"][0]


@needs_bubblewrap
def test_world_and_tmp_and_processes_are_limited(trial: Trial) -> None:
    limits = {"world_bytes": 4 << 20, "tmp_bytes": 1 << 20, "processes": 20}
    fill = "[open(f'{place}/{{i}}', 'wb').write(bytes(1 << 20)) for i in range(9)]"
    tries = [fill.replace("{place}", place).replace("{{i}}", "{i}") for place in (".", "/tmp")]
    tries += ["open('/dev/shm/x', 'wb').write(bytes(9 << 20)) == 9 << 20 or 1/0"]
    many = code(
        "import subprocess\n"
        "made = []\n"
        "try:\n"
        "    for _ in range(600): made.append(subprocess.Popen(['sleep', '100']))\n"
        "except OSError: pass\n"
        "print(len(made))\n"
    )
    result = trial("use_tools", "bubblewrap", limits=limits, calls=[attempts(tries), many])
    assert "reached" not in result["answers"][0], result["answers"][0]
    assert int(result["answers"][1]) < 320


@needs_bubblewrap
def test_a_diff_in_the_scratch_folder_is_as_exact_and_removed(trial: Trial, task: Path) -> None:
    replace = code("import shutil, os; shutil.rmtree('old'); os.mkdir('old', 0); os.mkfifo('old.fifo')")
    result = trial("use_tools", "bubblewrap", calls=[replace], old_kernel=True)
    assert result["changed"] == ["old.fifo", "old/a.txt", "old/b.txt"]


@both_kinds
def test_the_diff_is_exactly_what_the_tools_did(trial: Trial, task: Path, kind: str) -> None:
    sheet, deck = (min(path.name for path in (task / "world").glob(f"*.{kind}")) for kind in ("xlsx", "pptx"))
    calls = [
        ["list_files", {}],
        ["edit_cell", {"path": sheet, "cell": "B2", "value": "77"}],
        ["write_file", {"path": "new/out.csv", "content": "a,1\n"}],
        code("import os; os.remove('calendar.ics'); os.utime('mail.mbox')"),
        code(f"f = open({deck!r}, 'r+b'); x = f.read(1); f.seek(0); f.write(x)"),
        code(  # the folder is another one under the old name
            "import shutil, os; shutil.rmtree('old'); os.mkdir('old'); open('old/b.txt', 'w').write('B')"
        ),
        code("import os; print([os.path.join(d, n)[2:] for d, _, ns in os.walk('.') for n in ns])"),
    ]
    before = {path: path.read_bytes() for path in (task / "world").rglob("*") if path.is_file()}
    result = trial("use_tools", kind, calls=calls, ask=["old/a.txt", "calendar.ics", "new", "old/b.txt/x"])
    assert result["error"] is None
    assert result["changed"] == sorted(["calendar.ics", "new/out.csv", "old/a.txt", "old/b.txt", sheet])
    assert sorted(result["texts"]) == sorted(eval(result["answers"][-1]))
    assert result["texts"]["old/b.txt"] == "B" and result["texts"]["new/out.csv"] == "a,1\n"
    assert set(result["asked"].values()) == {"None"}
    assert before == {path: path.read_bytes() for path in (task / "world").rglob("*") if path.is_file()}
    if kind == "bubblewrap":
        touched = [*result["changed"], deck, "mail.mbox", "new", "old"]
        assert set(result["layer"]) == set(touched) - {"old/a.txt"}  # an opaque folder hides it


@both_kinds
def test_nothing_done_is_nothing_changed(trial: Trial, task: Path, kind: str) -> None:
    result = trial("use_tools", kind, calls=[["list_files", {}]])
    assert result["changed"] == []
    files = [path for path in (task / "world").rglob("*") if path.is_file()]
    assert sorted(result["texts"]) == sorted(path.relative_to(task / "world").as_posix() for path in files)
    assert kind == "process" or result["layer"] == []


@both_kinds
def test_links_and_pipes_that_the_agent_plants_are_not_opened(trial: Trial, task: Path, kind: str) -> None:
    plant = code(
        "import os\n"
        f"os.symlink({os.fspath(task / 'tests/checks.json')!r}, 'answer.txt')\n"
        "os.mkfifo('pipe')\n"
        f"os.symlink({os.fspath(task / 'tests')!r}, 'folder')\n"
        "os.remove('mail.mbox'); os.symlink('/etc/hostname', 'mail.mbox')\n"
        "import shutil; shutil.move('old', 'older'); os.symlink('older', 'old')\n"
    )
    asked = ["answer.txt", "pipe", "folder/checks.json", "mail.mbox", "old/a.txt"]
    result = trial("use_tools", kind, calls=[plant], ask=asked)
    assert set(result["asked"].values()) == {"None"}
    assert not any(SECRET in text for text in result["texts"].values())
    moved = [f"{folder}/{name}" for folder in ("old", "older") for name in ("a.txt", "b.txt")]
    assert result["changed"] == sorted(["answer.txt", "folder", "mail.mbox", "old", "pipe", *moved])


WRITER = code(
    "import os, time\n"
    "child = os.fork()\n"
    "if child == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        for fd in range(3): os.close(fd)\n"
    "        while True:\n"
    "            with open('ticks', 'a') as file: file.write('x')\n"
    "            time.sleep(0.005)\n"
    "    os._exit(0)\n"
    "os.waitpid(child, 0)\n"
    "while not os.path.exists('ticks'): time.sleep(0.005)\n"
)


@both_kinds
def test_a_background_writer_is_dead_after_the_freeze(trial: Trial, kind: str) -> None:
    result = trial("watch_a_writer", kind, calls=[WRITER])
    assert result["first"] > 0
    assert result["later"] == result["first"]
    assert result["children"] == []


@needs_bubblewrap
def test_a_frozen_diff_is_sealed(trial: Trial) -> None:
    assert trial("change_frozen", "bubblewrap")["refused"] == "Read-only file system"


@both_kinds
def test_a_dead_server_is_an_error_at_once_and_says_how_it_died(trial: Trial, kind: str) -> None:
    calls = [["list_files", {}], code("import time; time.sleep(9)"), ["list_files", {}]]
    result = trial("lose_server", kind, calls=calls, kill_after_s=1.0)
    assert len(result["answers"]) == 1
    assert result["error"] == "Connection closed" and result["waited"] < 2
    assert result["died"].startswith("tool server exit -9")


@both_kinds
def test_a_call_without_an_answer_ends_at_its_deadline(trial: Trial, kind: str) -> None:
    result = trial("use_tools", kind, calls=[code("import time; time.sleep(9)")], timeout_s=0.5)
    assert "tim" in result["error"].lower() and 0.4 < result["waited"] < 2
    assert result["died"] is None


@needs_bubblewrap
@pytest.mark.parametrize("said", ["bwrap: No permissions to create new namespace", ""])
def test_a_bwrap_that_fails_is_one_error_and_leaves_nothing(trial: Trial, tmp_path: Path, said: str) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n[ -z '{said}' ] || echo '{said}' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    result = trial("fail_to_open", "bubblewrap", path=f"{tmp_path}:/usr/bin:/bin")
    assert result["error"] == f"start: {said or 'bwrap ended at once'}"
    assert result["left"] == []


@needs_bubblewrap
def test_a_bwrap_that_hangs_ends_at_the_deadline(trial: Trial, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\nsleep 100\n")
    fake.chmod(0o755)
    result = trial("fail_to_open", "bubblewrap", path=f"{tmp_path}:/usr/bin:/bin", limits={"start_s": 0.3})
    assert result["error"] == "start: bwrap was not ready within 0.3 s"
    assert result["left"] == []


@needs_bubblewrap
def test_a_process_with_threads_or_without_bwrap_is_refused(trial: Trial, tmp_path: Path) -> None:
    error = "start: the calling process must have one thread, got 2"
    assert trial("fail_to_open", "bubblewrap", thread=True)["error"] == error
    assert trial("fail_to_open", "bubblewrap", path=f"{tmp_path}")["error"] == "start: bwrap not found"


def test_open_sandbox_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='kind must be "bubblewrap", "process" or "modal", got \'auto\''):
        open_sandbox("auto", tmp_path, tmp_path, lambda fd, root: None)
    with pytest.raises(ValueError, match="world must be a folder, got .*nowhere"):
        open_sandbox("process", tmp_path / "nowhere", tmp_path, lambda fd, root: None)
    with pytest.raises(ValueError, match="file_bytes must be positive, got 0"):
        Limits(file_bytes=0)


def test_a_frozen_world_refuses_paths_that_leave_it(tmp_path: Path) -> None:
    frozen = FrozenWorld(lower=tmp_path, root=tmp_path)
    for path in ("/etc/passwd", "../x", "a/../../x", "", "."):
        with pytest.raises(ValueError, match="path must be relative and stay inside the world"):
            frozen.path(path)
    with pytest.raises(ValueError, match="exactly one of upper and root must be given"):
        FrozenWorld(lower=tmp_path)


def test_results_that_the_tools_keep_are_no_change(tmp_path: Path) -> None:
    lower, root = tmp_path / "lower", tmp_path / "root"
    lower.mkdir()
    (root / ".spill").mkdir(parents=True)
    (root / ".spill" / "1.txt").write_text("long")
    (root / ".spilled").write_text("x")
    assert FrozenWorld(lower=lower, root=root).changed() == [".spilled"]
    shutil.rmtree(root / ".spill")
    (root / ".spill").symlink_to("/etc")
    assert FrozenWorld(lower=lower, root=root).changed() == [".spill", ".spilled"]


@both_kinds
def test_a_killed_server_is_started_again_over_the_world_as_it_is(trial: Trial, kind: str) -> None:
    calls = [["write_file", {"path": "kept.txt", "content": "kept"}]]
    result = trial("restart_server", kind, calls=calls, again=[["read_file", {"path": "kept.txt"}]])
    assert result["first"]["error"] is None and result["died"].startswith("tool server exit")
    assert result["second"] == {"answers": ["kept"], "error": None}
    assert result["changed"] == ["kept.txt"] and result["late"] == "start: the sandbox is frozen"


@both_kinds
def test_a_frozen_world_goes_on_with_what_was_written_and_without_what_ran(trial: Trial, kind: str) -> None:
    ticking = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True: open('ticks', 'a').write('x'); time.sleep(0.01)\n"
        "while not os.path.exists('ticks'): time.sleep(0.01)\n"
    )
    rounds = [
        [["write_file", {"path": "first.txt", "content": "1"}], code("import os; os.remove('old/a.txt')")],
        [["read_file", {"path": "first.txt"}], ["write_file", {"path": "old/a.txt", "content": "new"}]],
        [["read_file", {"path": "old/a.txt"}], code(ticking)],
    ]
    result = trial("go_on", kind, rounds=rounds)
    assert [one["error"] for one in result["answers"]] == [None] * 3
    assert result["answers"][1]["answers"][0] == "1" and result["answers"][2]["answers"][0] == "new"
    both = ["first.txt", "old/a.txt"]
    assert result["changed"] == [both, both, [*both, "ticks"]] and result["last"] == [*both, "ticks"]
    assert result["grown"] == 0
    assert result["twice"] == "start: the sandbox is not frozen"


@both_kinds
def test_a_thaw_that_fails_leaves_the_world_frozen_and_can_be_tried_again(trial: Trial, kind: str) -> None:
    calls = [["write_file", {"path": "kept.txt", "content": "kept"}]]
    result = trial("fail_to_thaw", kind, calls=calls, again=[["read_file", {"path": "kept.txt"}]])
    assert result["cause"].startswith("start: ") and result["children"] == 0
    assert result["changed"] == ["kept.txt"]
    assert result["again"] == {"answers": ["kept"], "error": None}


def test_choose_sandbox_refuses_an_unknown_kind_in_one_line() -> None:
    with pytest.raises(
        ValueError, match='^sandbox must be "auto", "bubblewrap", "process" or "modal", got \'docker\'$'
    ):
        choose_sandbox("docker")


@needs_bubblewrap
def test_choose_sandbox_takes_bubblewrap_where_it_works() -> None:
    kind, line = choose_sandbox("auto")
    assert kind == "bubblewrap", line
    assert "no network" in line and "\n" not in line
    assert choose_sandbox("bubblewrap") == (kind, line)


def test_choose_sandbox_without_bwrap_falls_back_or_fails_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    kind, line = choose_sandbox("auto")
    assert kind == "process"
    for part in ("bwrap not found", "apt install bubblewrap", "can read this user's files"):
        assert part in line
    with pytest.raises(
        SandboxError, match="bwrap not found; install it with: apt install bubblewrap, or use"
    ):
        choose_sandbox("bubblewrap")
    kind, line = choose_sandbox("process")
    assert kind == "process" and "with network" in line and "\n" not in line


@needs_bubblewrap
@pytest.mark.skipif(
    os.geteuid() != 0, reason="not root: the other tests of this file ran as an ordinary user"
)
def test_an_ordinary_user_gets_the_same_sandbox() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not ordinary", __file__]
    own = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp", "USER": "nobody", "LOGNAME": "nobody"}
    done = subprocess.run(
        as_nobody(command),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def as_nobody(command: list[str]) -> list[str]:
    """The command as user nobody, with the interpreter within reach even if it lies in root's home."""
    needed = dict.fromkeys([sys.base_prefix, sys.prefix, os.fspath(REPOSITORY)])
    steps = ["set -e", "mount --make-rprivate /"]
    for path in needed:
        closed = [parent for parent in reversed(Path(path).parents) if not parent.stat().st_mode & 0o001]
        if closed:
            steps += [
                f"keep=$(mktemp -d); mount --rbind '{path}' $keep",
                f"mount -t tmpfs -o mode=755 none '{closed[0]}'; mkdir -p '{path}'",
                f"mount --move $keep '{path}'; rmdir $keep",
            ]
    steps += ['exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"']
    return ["unshare", "-m", "sh", "-c", "\n".join(steps), "sh", *command]
