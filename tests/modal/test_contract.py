"""What every sandbox promises, tried on all kinds; Modal's with its own client against its own services on loopback."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import has, needs_modal
from test_sandbox import SECRET, attempts, code, needs_bubblewrap

from system.fleet.local import WARM, LocalFleet
from system.tools.server import expected_tools
from system.world.company import make_company
from system.world.office import write_world

REPOSITORY = Path(__file__).parents[2]


MARKS = {"bubblewrap": [needs_bubblewrap], "process": [], "modal": [needs_modal]}


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [pytest.param(name, marks=MARKS[name]) for name in names])


every_kind = kinds("bubblewrap", "process", "modal")
closed_kinds = kinds("bubblewrap", "modal")

Trial = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a task, with: odd name") / "world"
    write_world(make_company(7, split="train"), folder)
    (folder / "old").mkdir()
    (folder / "old" / "a.txt").write_text("a")
    (folder / "old" / "b.txt").write_text("b")
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Modal's service, or None where its client is not installed."""
    if not has("modal"):
        yield None
        return
    from fake_modal import FakeModal

    with FakeModal(tmp_path_factory.mktemp("modal")) as modal:
        yield modal


@pytest.fixture(scope="module")
def trial(world: Path, service: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Runs an action of contract_trials.py in a process of the fleet, as a trial does; nothing is left of it."""
    scratch = tmp_path_factory.mktemp("scratch")
    os.environ["BARTLEBY_TEST_SECRET"] = SECRET
    client = () if service is None else (f"system.sandbox.service:load={service.config}",)
    with LocalFleet(scratch, target="contract_trials:run", warm=(*WARM, *client)) as fleet:
        counter = iter(range(10_000))

        def run(action: str, kind: str, **spec: Any) -> dict[str, Any]:
            limits = {"start_s": 90.0, "stop_s": 60.0, **spec.pop("limits", {})}
            if kind == "modal":
                assert service is not None
                spec["modal"] = {"image": "python:3.11", "config": str(service.config)}
            spec |= {"action": action, "kind": kind, "world": f"{world}", "scratch": f"{scratch}"}
            fleet.start({"trial_id": f"trial {next(counter)}", "deadline_s": 200, "limits": limits, **spec})
            results = fleet.poll(240)
            assert len(results) == 1
            outcome = results[0].get("outcome")
            assert outcome is None, f"{outcome}\n{fleet.log.read_text()[-3000:]}"
            assert os.listdir(scratch) == ["fleet.log"], "a folder is left"
            assert results[0]["left"] == [] or action == "fail_to_open"
            assert service is None or service.running() == []
            return results[0]

        yield run
    del os.environ["BARTLEBY_TEST_SECRET"]


SLEEP = code("import time; time.sleep(60)")


@every_kind
def test_tools_are_listed_the_stream_is_taken_once_and_nothing_done_is_nothing_changed(
    trial: Trial, kind: str
) -> None:
    result = trial("use_up", kind)
    assert result["kind"] == kind and result["tools"] == sorted(expected_tools("brief"))
    assert result["connect"] == "connect: the stream was taken before"
    assert result["same"] and result["changed"] == []
    assert kind == "process" or result["root"] == "/world"


@every_kind
def test_the_frozen_world_is_exactly_what_the_tools_did(trial: Trial, world: Path, kind: str) -> None:
    sheet, deck = (min(path.name for path in world.glob(f"*.{kind}")) for kind in ("xlsx", "pptx"))
    calls = [
        ["list_files", {}],
        ["edit_cell", {"path": sheet, "cell": "B2", "value": "77"}],
        ["write_file", {"path": "new/out.csv", "content": "a,1\n"}],
        code("import os; os.remove('calendar.ics'); os.utime('mail.mbox')"),
        code(f"f = open({deck!r}, 'r+b'); x = f.read(1); f.seek(0); f.write(x)"),
        code("import shutil, os; shutil.rmtree('old'); os.mkdir('old'); open('old/b.txt', 'w').write('B')"),
        code("import os; os.mkdir('shut', 0); open('shut.txt', 'w').write('s'); os.chmod('shut.txt', 0)"),
        code("import os; print([os.path.join(d, n)[2:] for d, _, ns in os.walk('.') for n in ns])"),
    ]
    before = {path: path.read_bytes() for path in world.rglob("*") if path.is_file()}
    result = trial("use_tools", kind, calls=calls, ask=["old/a.txt", "calendar.ics", "new", "old/b.txt/x"])
    assert result["error"] is None, result
    wanted = ["calendar.ics", "new/out.csv", "old/a.txt", "old/b.txt", "shut.txt", sheet]
    assert result["changed"] == sorted(wanted)
    assert sorted(result["texts"]) == sorted(eval(result["answers"][-1]))
    assert result["texts"]["old/b.txt"] == "B" and result["texts"]["new/out.csv"] == "a,1\n"
    assert set(result["asked"].values()) == {"None"}
    assert before == {path: path.read_bytes() for path in world.rglob("*") if path.is_file()}


@every_kind
def test_links_pipes_odd_names_and_deep_nests_are_changes_and_not_opened(trial: Trial, kind: str) -> None:
    plant = code(
        "import os, shutil\n"
        f"os.symlink({os.fspath(REPOSITORY / 'setup.cfg')!r}, 'answer.txt')\n"
        "os.mkfifo('pipe')\n"
        f"os.symlink({os.fspath(REPOSITORY)!r}, 'folder')\n"
        "os.remove('mail.mbox'); os.symlink('/etc/hostname', 'mail.mbox')\n"
        "shutil.move('old', 'older'); os.symlink('older', 'old')\n"
        "open('a\\nb', 'w').write('x'); open(b'caf\\xe9', 'w').write('x'); os.mkdir('back\\\\slash')\n"
        "for _ in range(300): os.mkdir('d'); os.chdir('d')\n"
        "open('x', 'w').write('x')\n"
    )
    asked = ["answer.txt", "pipe", "folder/setup.cfg", "mail.mbox", "old/a.txt"]
    result = trial("use_tools", kind, calls=[plant], ask=asked)
    assert set(result["asked"].values()) == {"None"}
    moved = [f"{folder}/{name}" for folder in ("old", "older") for name in ("a.txt", "b.txt")]
    odd = ["a\nb", "caf\udce9"]
    planted = ["answer.txt", "folder", "mail.mbox", "old", "pipe"]
    (deep,) = [path for path in result["changed"] if path.startswith("d/d")]
    assert result["changed"] == sorted([*planted, *moved, *odd, deep])


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


@every_kind
def test_a_background_writer_is_dead_after_the_freeze_and_its_late_writes_are_not_seen(
    trial: Trial, kind: str
) -> None:
    result = trial("watch_a_writer", kind, calls=[WRITER])
    assert result["first"] > 0 and result["later"] == result["first"] and result["children"] == []


@every_kind
def test_a_dead_server_ends_the_call_says_how_and_is_started_again_over_the_world_as_it_is(
    trial: Trial, kind: str
) -> None:
    calls = [["write_file", {"path": "kept.txt", "content": "kept"}], SLEEP, ["list_files", {}]]
    again = [["read_file", {"path": "kept.txt"}]]
    result = trial("restart_server", kind, calls=calls, again=again, kill_after_s=2.0)
    assert len(result["first"]["answers"]) == 1 and result["first"]["error"] == "Connection closed"
    assert result["alive"] is None and result["died"].startswith("tool server exit"), result["died"]
    assert result["second"] == {"answers": ["kept"], "error": None}
    assert result["changed"] == ["kept.txt"] and result["late"] == "start: the sandbox is frozen"


@every_kind
def test_a_call_without_an_answer_ends_at_its_deadline(trial: Trial, kind: str) -> None:
    result = trial("use_tools", kind, calls=[code("import time; time.sleep(40)")], timeout_s=1.0)
    assert "tim" in result["error"].lower() and result["waited"] > 0.9 and result["died"] is None


@every_kind
def test_a_start_that_is_late_is_one_error_and_leaves_nothing(trial: Trial, kind: str) -> None:
    result = trial("fail_to_open", kind, limits={"start_s": 1e-6})
    assert result["error"].startswith("start: ") and "\n" not in result["error"]
    assert result["left"] == []


STATUS = code(
    "import os\n"
    "lines = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines())\n"
    "print(os.getuid(), int(lines['CapEff'], 16), lines['NoNewPrivs'], lines['Seccomp'])\n"
)


@pytest.fixture(scope="module")
def looked(trial: Trial) -> Callable[[str], dict[str, str]]:
    """What is seen and reached from inside a sandbox of a kind, by one trial of each."""

    @functools.cache
    def look(kind: str) -> dict[str, str]:
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen()
            name = f"\0bartleby-contract-{os.getpid()}"
            abstract.bind(name)
            abstract.listen()
            calls = {
                "environment": code(_environment(() if kind == "process" else (1, 2))),
                "memory": attempts(["open(f'/proc/{os.getppid()}/maps').read()"]),
                "network": attempts([*NETWORK, *_connections(tcp.getsockname(), name)]),
                "user": STATUS,
                "files": attempts(FILES),
                "limits": attempts(LIMITS),
            }
            limits = {"memory_bytes": 200 << 20, "file_bytes": 1 << 20}
            result = trial("use_tools", kind, limits=limits, calls=list(calls.values()))
        assert result["error"] is None, result
        return dict(zip(calls, result["answers"], strict=True))

    return look


def _environment(first: tuple[int, ...]) -> str:
    """Looks for what is the host's; the first processes are the sandbox's own, where it has any."""
    return (
        "import os\n"
        "texts = [repr(dict(os.environ))]\n"
        f"for pid in ['self', os.getppid(), *{first}]:\n"
        "    try: texts.append(open(f'/proc/{pid}/environ', 'rb').read(1 << 20).decode('latin-1'))\n"
        "    except OSError: texts.append('refused')\n"
        "print([word in repr(texts) for word in ('BARTLEBY', '4821', 'PYTHONPATH', 'MODAL')])\n"
    )


NETWORK = ["socket.create_connection(('1.1.1.1', 53), 2)", "socket.socket(socket.AF_VSOCK)"]
FILES = [
    *[f"os.stat({os.fspath(REPOSITORY / name)!r})" for name in ("setup.cfg", "system/verify")],
    *[f"os.stat('/opt/bartleby/system/{name}')" for name in ("verify", "world")],
    *["open('/usr/bin/x', 'w')", "os.kill(1, 9)"],
]
LIMITS = ["len(bytearray(900 << 20))", "open('big', 'wb').write(bytes(2 << 20)) == 2 << 20 or 1/0"]


def _connections(tcp: object, name: str) -> list[str]:
    return [
        f"socket.create_connection({tcp!r}, 2)",
        f"socket.socket(socket.AF_UNIX).connect({name!r}) or 1",
    ]


@every_kind
def test_neither_environment_nor_memory_of_the_host_shows(looked: Any, kind: str) -> None:
    assert looked(kind)["environment"] == "[False, False, False, False]"
    assert looked(kind)["memory"] == "refused PermissionError"


@closed_kinds
def test_no_socket_reaches_the_host(looked: Any, kind: str) -> None:
    assert looked(kind)["network"].count("refused") == 4, looked(kind)["network"]


@closed_kinds
def test_the_tools_are_an_ordinary_user_and_what_grades_and_solves_is_not_there(
    looked: Any, kind: str
) -> None:
    own = (
        os.geteuid() if kind == "modal" and os.geteuid() != 0 else 1000
    )  # an image's own user stays what it is
    assert looked(kind)["user"] == f"{own} 0 1 2"
    assert "reached" not in looked(kind)["files"], looked(kind)["files"]


@every_kind
def test_memory_and_file_size_are_limited(looked: Any, kind: str) -> None:
    assert "reached" not in looked(kind)["limits"], looked(kind)["limits"]


def test_without_the_client_the_cause_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['modal'] = None\n"
        "from system.sandbox import SandboxError, service\n"
        "try: service.load('')\n"
        "except SandboxError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("start: sandbox modal needs the extra modal: pip install bartleby[modal] (")
    assert done.stdout.count("\n") == 1, done.stderr
