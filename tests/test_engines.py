"""Several engines: trials spread over those that live, weights for all, and engines that end and come back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from test_engine import CONFIG, full_logprob, large_norms, mean_gap, prompt, request
from test_model import write_tokenizer
from test_run import check_tokens

from system.engine import (
    Applied,
    Back,
    Completion,
    EngineConnection,
    EngineError,
    EngineHandle,
    GenerateRequest,
    Happening,
    Lost,
    RestartRule,
    Router,
    connect,
    start_embedded_engine,
)
from system.journal import read_journal, replayed
from system.policy import save_policy, save_weights
from system.record.metrics import read_jsonl
from system.trainer.rescoring import Rescorer
from system.trainer.step import StepRow

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 700
PATIENT = RestartRule(pulse_s=0.2, silence_s=60.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A file of weights for each version; version 0 is the policy's."""
    folder = tmp_path_factory.mktemp("weights")
    paths = {version: folder / f"{version}.safetensors" for version in range(6)}
    for version, path in paths.items():
        save_weights(path, large_norms(CONFIG, version))
    return paths


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("e")
    write_tokenizer(folder / "policy", CONFIG.token_count)
    save_policy(folder / "policy", CONFIG, large_norms(CONFIG, 0))
    engines = [
        start_embedded_engine(
            folder / "policy", folder / f"s{i}", folder / f"log{i}.jsonl", CONTEXT, 8, 1, "cpu"
        )
        for i in range(2)
    ]
    router = Router(engines, hold=folder / "held", rule=PATIENT)
    yield router
    router.close()
    assert not any(engine.alive() for engine in engines) and not (folder / "held").exists()


@pytest.fixture
def router(started: Router, weights: dict[int, Path]) -> Iterator[Router]:
    """Two engines that live, at version 0, with no trial and no cache."""
    started.rule = PATIENT
    for place in started.places:
        place.ended_at_s.clear()
    update(started, 0, weights[0], reset_kv=True)
    yield started
    assert started.routes.load == (0, 0) and not started._lives
    until(started, lambda seen: all(place.status == "live" for place in started.places))


def handle(router: Router, number: int) -> EngineHandle:
    engine = router.places[number].engine
    assert isinstance(engine, EngineHandle)
    return engine


def until(
    router: Router, over: Callable[[list[Happening]], bool], *, limit_s: float = 120.0
) -> list[Happening]:
    """Poll until that has happened; everything that has."""
    seen: list[Happening] = []
    deadline = time.monotonic() + limit_s
    while not over(seen):
        assert time.monotonic() < deadline, seen
        seen += router.poll(0.02)
        time.sleep(0.005)
    return seen


def update(router: Router, version: int, path: Path, *, reset_kv: bool = False) -> list[Happening]:
    router.begin_update(version, str(path), reset_kv=reset_kv)
    return until(router, lambda seen: Applied(version) in seen)


class Asking:
    """Requests in threads, each at the engine of its trial; what became of them by trial."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.done: dict[str, Completion | Exception] = {}
        self.threads: list[threading.Thread] = []
        self.addresses: dict[str, str] = {}
        self.clients: dict[str, EngineConnection] = {}

    def ask(self, trial: str, ids: Sequence[int], *, most: int, seed: int = 1) -> None:
        if trial not in self.addresses:
            address = self.router.place(trial)
            assert address is not None
            self.addresses[trial], self.clients[trial] = address, connect(address)
        asked = request(trial, list(ids), stop_token_ids=[], max_tokens=most, seed=seed)
        self.done.pop(trial, None)
        self.threads.append(threading.Thread(target=self._ask, args=(trial, asked)))
        self.threads[-1].start()

    def _ask(self, trial: str, asked: GenerateRequest) -> None:
        try:
            self.done[trial] = self.clients[trial].generate(asked)
        except (OSError, EngineError) as error:
            self.done[trial] = error

    def wait_until_running(self) -> None:
        """All that were asked are being decoded."""
        wanted = len(self.threads)
        deadline = time.monotonic() + 60
        while self.router.stats()["running"] + len(self.done) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def wait(self) -> None:
        """All have their answers."""
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        self.threads = []

    def end(self) -> dict[str, str]:
        """Wait for all, release all; why each trial's engine ended, where it did."""
        self.wait()
        for client in self.clients.values():
            client.close()
        failed = {trial: isinstance(done, Exception) for trial, done in self.done.items()}
        causes = {trial: self.router.release(trial, failed=failed[trial]) for trial in self.addresses}
        return {trial: cause for trial, cause in causes.items() if cause}


def test_trials_spread_evenly_stay_where_they_are_and_leave_room(router: Router):
    addresses = [place.engine.address for place in router.places]
    assert [router.place(f"t{i}") for i in range(4)] == addresses * 2
    assert router.routes.load == (2, 2)
    assert router.release("t0", failed=False) == router.release("t2", failed=True) == ""
    assert router.release("t0", failed=False) == router.release("nobody", failed=True) == ""
    assert [router.place(f"u{i}") for i in range(3)] == [addresses[0], addresses[0], addresses[0]]
    assert router.routes.load == (3, 2)
    for name in ("t1", "t3", "u0", "u1", "u2"):
        router.release(name, failed=False)


def test_weights_change_for_all_engines_while_requests_run_and_none_is_dropped(
    router: Router, weights: dict[int, Path]
):
    asking = Asking(router)
    for number in range(6):
        asking.ask(f"t{number}", prompt(12, number), most=600, seed=number)
    asking.wait_until_running()
    for version in (1, 2):
        assert update(router, version, weights[version]) == [Applied(version)]
    assert asking.end() == {}
    spread = [asking.addresses[f"t{number}"] for number in range(6)]
    assert spread[::2] == [spread[0]] * 3 and spread[1::2] == [spread[1]] * 3 and spread[0] != spread[1]
    for done in asking.done.values():
        assert isinstance(done, Completion) and done.finish_reason == "length"
        assert len(done.token_ids) == len(done.policy_version) == 600
        assert done.policy_version == sorted(done.policy_version) and set(done.policy_version) == {0, 1, 2}
    assert router.stats()["policy_version"] == 2


@pytest.mark.parametrize("reset_kv", [False, True])
def test_logprobs_are_those_of_a_recompute_whether_caches_are_kept_or_reset(
    router: Router, weights: dict[int, Path], reset_kv: bool
):
    """Turns of several trials with new weights inside and between them; half of them share their prompt."""
    before = router.stats()["shared_tokens"]
    rows: dict[str, list[int]] = {f"t{i}": prompt(40, i % 2) for i in range(6)}
    told: dict[str, StepRow] = {}
    version, asking = 0, Asking(router)
    for turn in range(2):
        for number, (trial, row) in enumerate(rows.items()):
            asking.ask(trial, row, most=150, seed=10 * turn + number)
        asking.wait_until_running()
        version += 1
        update(router, version, weights[version], reset_kv=reset_kv)
        asking.wait()
        for trial, done in asking.done.items():
            assert isinstance(done, Completion)
            told[trial] = longer(told.get(trial), rows[trial], done)
            rows[trial] = told[trial].token_ids + prompt(9, turn)
        version += 1
        update(router, version, weights[version], reset_kv=reset_kv)
    assert asking.end() == {}
    rescorer = Rescorer(CONFIG, weights, temperature=1.0)
    kept = [one.logprob for one in rescorer.score_as_sampled(list(told.values()), latest=version)]
    fresh = [one.logprob for one in rescorer.score_by_own_version(list(told.values()), latest=version)]
    gaps = {"kept": 0.0, "fresh": 0.0}
    for row, *scored in zip(told.values(), kept, fresh, strict=True):
        assert set(row.policy_version) == {-1, 0, 1, 2, 3}
        for name, logprob in zip(gaps, scored, strict=True):
            some = [(a, b) for a, b, on in zip(row.rollout_logprob, logprob.tolist(), row.loss_mask) if on]
            gaps[name] = max(gaps[name], mean_gap(*map(list, zip(*some, strict=True))))
    right, other = ("fresh", "kept") if reset_kv else ("kept", "fresh")
    assert gaps[right] < 1e-4 < 1e-2 < gaps[other], gaps
    assert router.stats()["shared_tokens"] > before  # and no prefix came from older weights


def longer(row: StepRow | None, ids: list[int], done: Completion) -> StepRow:
    """The row with another turn."""
    old = len(row.token_ids) if row else 0
    given, said = [*ids[old:]], done.token_ids
    return StepRow(
        row_id="",
        trial_id="",
        group_id=0,
        token_ids=[*ids, *said],
        loss_mask=[*(row.loss_mask if row else []), *[False] * len(given), *[True] * len(said)],
        rollout_logprob=[*(row.rollout_logprob if row else []), *[0.0] * len(given), *done.logprob],
        policy_version=[*(row.policy_version if row else []), *[-1] * len(given), *done.policy_version],
        advantage=0.0,
        requests=(),
    )


def test_an_engine_that_is_killed_comes_back_with_the_newest_weights_while_the_other_goes_on(
    router: Router, weights: dict[int, Path], tmp_path: Path
):
    gone = Path(shutil.copy(weights[3], tmp_path / "w"))
    update(router, 3, gone)
    gone.unlink()  # as a trainer does that has written two more
    asking = Asking(router)
    for number in range(4):
        asking.ask(f"t{number}", prompt(12, number), most=600, seed=number)
    asking.wait_until_running()
    sampled = router.stats()["sampled_tokens"]
    pid, log = handle(router, 1).process.pid, Path(handle(router, 1).socket_path).with_name("log1.jsonl")
    whole = log.read_bytes()
    with log.open("ab") as file:
        file.write(b'{"session_id":"t1","tok')  # as one leaves that is killed in the middle of a line
    os.kill(pid, signal.SIGKILL)
    causes = asking.end()
    assert causes == dict.fromkeys(("t1", "t3"), "engine 1: engine must be running, got exit code -9")
    assert isinstance(asking.done["t1"], ConnectionError) and isinstance(asking.done["t3"], ConnectionError)
    assert isinstance(asking.done["t0"], Completion) and isinstance(asking.done["t2"], Completion)
    assert [router.place(f"u{number}") for number in range(2)] == [router.places[0].engine.address] * 2
    seen = until(router, lambda seen: any(isinstance(one, Back) for one in seen))
    assert [type(one) for one in seen] == [Lost, Back] and seen[0].cause == causes["t1"]  # pyright: ignore
    assert handle(router, 1).process.pid != pid
    assert router.place("v") == router.places[1].engine.address == asking.addresses["t1"]
    client = connect(router.places[1].engine.address)
    done = client.generate(request("v", prompt(30), stop_token_ids=[]))
    client.close()
    assert set(done.policy_version) == {3}
    expected = full_logprob(large_norms(CONFIG, 3), prompt(30) + done.token_ids, 30)
    assert mean_gap(done.logprob, expected) < 1e-5
    assert [line["session_id"] for line in read_jsonl(log)][whole.count(b"\n") :] == ["v"]
    stats = router.stats()
    assert stats["restarts"] >= 1 and stats["policy_version"] == 3 and stats["sampled_tokens"] > sampled
    for name in ("u0", "u1", "v"):
        assert router.release(name, failed=False) == ""


def test_an_engine_that_hangs_is_replaced_and_weights_count_once_all_that_live_have_them(
    router: Router, weights: dict[int, Path]
):
    router.rule = RestartRule(pulse_s=0.1, silence_s=4.0)
    asking = Asking(router)
    for number in range(2):
        asking.ask(f"t{number}", prompt(12, number), most=600, seed=number)
    asking.wait_until_running()
    os.kill(handle(router, 0).process.pid, signal.SIGSTOP)
    router.begin_update(4, str(weights[4]), reset_kv=False)
    seen = until(router, lambda seen: any(isinstance(one, Back) for one in seen))
    kinds = [type(one) for one in seen]
    assert kinds.index(Lost) < kinds.index(Applied)  # that it hangs held the weights up, not its return
    assert "engine 0: engine must answer within 4 s, got silence" in str(seen)
    assert list(asking.end()) == ["t0"] and isinstance(asking.done["t1"], Completion)
    assert [place.engine.stats()["policy_version"] for place in router.places] == [4, 4]


def test_without_an_engine_trials_wait_and_so_do_weights(router: Router, weights: dict[int, Path]):
    router.place("t")
    for number in range(2):
        os.kill(handle(router, number).process.pid, signal.SIGKILL)
    until(router, lambda seen: sum(isinstance(one, Lost) for one in seen) == 2)
    assert router.place("u") is None and router.routes.load == (1, 0)
    router.begin_update(5, str(weights[5]), reset_kv=False)
    seen = until(router, lambda seen: Applied(5) in seen)
    assert isinstance(seen[0], Back)  # nobody had the weights before
    assert router.place("u") is not None
    assert router.release("t", failed=True) and not router.release("u", failed=False)


def test_weights_that_are_refused_end_the_run_and_not_the_engine(router: Router, tmp_path: Path):
    lives = [place.life for place in router.places]
    state = large_norms(CONFIG, 1)
    state["d"] = state.pop("model.norm.weight")
    save_weights(tmp_path / "w", state)
    router.begin_update(1, str(tmp_path / "w"), reset_kv=False)
    with pytest.raises(EngineError, match="missing: model.norm.weight; unexpected: d"):
        until(router, lambda seen: False)
    assert [place.life for place in router.places] == lives
    assert router.stats()["policy_version"] == 0


def test_the_end_of_a_run_waits_for_a_start_and_failing_starts_end_a_run_with_one_line(tmp_path: Path):
    write_tokenizer(tmp_path / "policy", CONFIG.token_count)
    save_policy(tmp_path / "policy", CONFIG, large_norms(CONFIG, 0))
    engine = start_embedded_engine(tmp_path / "policy", tmp_path / "s", tmp_path / "l", 64, 2, 1, "cpu")
    engine.process.kill()
    router = Router([engine], hold=tmp_path / "held", rule=PATIENT)
    until(router, lambda seen: any(isinstance(one, Lost) for one in seen))
    router.close()  # while it is being started again
    assert not engine.alive() and not (tmp_path / "s").exists()
    (tmp_path / "policy" / "config.json").unlink()
    router = Router([engine], hold=tmp_path / "held", rule=RestartRule(most=1, window_s=3600.0))
    with pytest.raises(EngineError) as raised:
        until(router, lambda seen: False)
    router.close()
    told = str(raised.value)
    assert told.startswith("engine 0 must end at most 1 times in 3600 s, got 2, the last: ")
    assert "policy folder must have config.json" in told and "\n" not in told
    assert not engine.alive()


def test_a_run_goes_on_when_its_only_engine_is_killed_in_training_and_in_the_evaluation(tmp_path: Path):
    folder = tmp_path / "run"
    options = [
        *("--steps", "2", "--groups", "2", "--group-size", "4", "--tasks", "12", "--worlds", "4"),
        *("--tasks-held-out", "10", "--attempts", "1", "--max-running", "8", "--max-retries", "0"),
    ]
    script = [sys.executable, str(ROOT / "experiments" / "train.py"), *options, "--out", str(folder)]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        for purpose in ("train", "eval"):
            kill_engine_at(run, folder, purpose)
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert output.count("it is started again") == output.count("is back after") == 2
    trials = list(read_jsonl(folder / "trajectories.jsonl"))
    lost = [trial for trial in trials if trial["outcome"]["kind"] == "system_error"]
    assert {trial["purpose"] for trial in lost} == {"train", "eval"}
    for trial in lost:  # without a single retry to spare: nobody is to blame
        assert trial["blameless"] and trial["outcome"]["phase"] == "engine"
    versions = {v for trial in trials if trial["purpose"] == "eval" for v in sampled_by(trial)}
    assert versions == {2}
    tags = {"arm": "policy", "seed": 0}
    settings, entries = read_journal(folder / "events.jsonl", tags=tags)
    state, difference = replayed(settings, entries)
    assert difference is None and state.finished and state.trained == 2 and state.lost == 0
    told = check_tokens.main(check_tokens.Config(run=folder))
    assert told["rows"] > 0 and told["faults"] == []


def kill_engine_at(run: subprocess.Popen[str], folder: Path, purpose: str) -> None:
    """Kill the engine of a run once a trial of this purpose has ended."""
    told, deadline = folder / "trajectories.jsonl", time.monotonic() + 600
    while not told.exists() or f'"purpose":"{purpose}"' not in told.read_text():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (engine,) = [p for p in psutil.Process(run.pid).children() if "system.engine.embedded" in p.cmdline()]
    engine.kill()


def sampled_by(trial: dict[str, Any]) -> list[int]:
    return [v for row in trial.get("rows", ()) for v in row["policy_version"] if v >= 0]


class Paper:
    """An engine without a process: it takes its time, and ends when it is told to, whatever it is doing."""

    def __init__(self, number: int, random: Random) -> None:
        self.address, self.random = f"paper-{number}", random
        self.version, self.ended, self.starts, self.closed = 0, False, 0, False

    def fault(self, timeout_s: float) -> str:
        return "over" if self.ended else ""

    def _work(self) -> None:
        time.sleep(self.random.random() * 0.004)

    def restart(self) -> None:
        self._work()
        if self.random.random() < 0.2:
            raise EngineError("no room")
        self.version, self.starts, self.ended = 0, self.starts + 1, False

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        assert weights == f"weights-{version}"
        life = self.starts
        self._work()
        if self.ended or self.starts != life:
            raise ConnectionError("it went away")
        self.version = version

    def stats(self) -> dict[str, Any]:
        if self.ended:
            raise ConnectionError("it went away")
        return {"policy_version": self.version}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_ends_weights_and_trials_keeps_the_promises(seed: int, tmp_path: Path):
    """A trial begins at an engine that lives and has the weights that were applied; Applied means all that live."""
    random = Random(seed)
    engines = [Paper(number, Random(100 * seed + number)) for number in range(3)]
    rule = RestartRule(pulse_s=0.002, silence_s=60.0, most=10_000)
    router = Router(engines, hold=tmp_path, rule=rule)
    trials: dict[str, tuple[Paper, int]] = {}
    wanted = applied = 0
    ends = 0
    for event in range(600):
        kind = random.choices(("place", "release", "end", "update", "poll"), (30, 30, 3, 7, 30))[0]
        if kind == "place":
            name = f"t{event}"
            address = router.place(name)
            if address is None:
                assert all(place.status != "live" for place in router.places)
            else:
                engine = engines[int(address[-1])]
                trials[name] = engine, engine.starts
                assert engine.ended or engine.version >= applied
        elif kind == "release" and trials:
            name = random.choice(sorted(trials))
            engine, starts = trials.pop(name)
            gone = engine.ended or engine.starts != starts
            assert bool(router.release(name, failed=True)) == gone
        elif kind == "end":
            random.choice(engines).ended = True
            ends += 1
        elif kind == "update" and wanted == applied:
            wanted += 1
            router.begin_update(wanted, f"weights-{wanted}", reset_kv=False)
        else:
            time.sleep(0.001)
            for happened in router.poll(0.02):
                if isinstance(happened, Applied):
                    applied = happened.version
                    for place, engine in zip(router.places, engines, strict=True):
                        assert place.status != "live" or engine.ended or engine.version == applied == wanted
        assert sum(router.routes.load) == len(trials) == len(router.routes.engine_of)
    router.poll()
    until(router, lambda seen: all(place.status == "live" for place in router.places) and not router.moving)
    assert {engine.version for engine in engines} == {wanted}
    assert ends > 0 and wanted > 0
    router.close()
    assert all(engine.closed for engine in engines)


def test_counters_of_earlier_lives_count_and_those_of_the_moment_do_not():
    class Told:
        """Says what it is told to say."""

        address = "nowhere"

        def __init__(self) -> None:
            self.said: dict[str, Any] = {}
            self.ended = ""

        def fault(self, timeout_s: float) -> str:
            return self.ended

        def restart(self) -> None:
            self.said, self.ended = {"sampled_tokens": 1, "running": 0, "policy_version": 7}, ""

        def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None: ...

        def stats(self) -> dict[str, Any]:
            return self.said

        def close(self) -> None: ...

    engine = Told()
    router = Router([engine], hold=Path("/nonexistent"), rule=RestartRule())
    engine.said = {"sampled_tokens": 20, "running": 3, "busy_s": 1.5, "policy_version": 6}
    assert router.stats() == {**engine.said, "restarts": 0}
    engine.ended = "over"
    until(router, lambda seen: any(isinstance(one, Back) for one in seen))
    after = {"sampled_tokens": 21, "busy_s": 1.5, "running": 0, "policy_version": 7, "restarts": 1}
    assert router.stats() == after
    router.close()
