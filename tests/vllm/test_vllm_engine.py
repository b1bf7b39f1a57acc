"""vLLM behind our front, as trials and the driver see it: a real server on the CPU, in float32, exact to rounding.

In the order of the file: the last tests end the server that the others share.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_server import CLERK, CONTEXT, STALL_S, settings

from core.counter import counter_hash
from system.engine import Completion, EngineClient, EngineError, GenerateRequest
from system.engine.client import frame
from system.engine.vllm import probe, start_vllm_engine
from system.engine.vllm.engine import VllmEngine
from system.engine.vllm.sending import Sender
from system.model import Qwen3
from system.policy import load_policy, save_weights

CONFIG, START = load_policy(CLERK)
TOLERANCE = 1e-4
"""Of the mean gap of logprobs in float32; an update that goes wrong is off by 0.1 and more."""

LONG_S = 300.0


def other(seed: int) -> dict[str, Tensor]:
    """The policy's weights, each changed by a tenth or so."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value * (1 + 0.1 * torch.randn(value.shape, generator=generator))
        for name, value in START.items()
    }


def written(folder: Path, state: dict[str, Tensor], name: str = "w") -> str:
    path = folder / f"{name}.safetensors"
    save_weights(path, state)
    return str(path)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, CONFIG.token_count, (length,), generator=generator).tolist()


def request(name: str, token_ids: list[int], **changes: Any) -> GenerateRequest:
    plain = GenerateRequest(
        request_id=f"{name}/{len(token_ids)}",
        session_id=name,
        token_ids=token_ids,
        max_tokens=24,
        stop_token_ids=[],
        seed=counter_hash(7, len(token_ids)),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    return replace(plain, **changes)


def logprobs(state: dict[str, Tensor], row: list[int], start: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the vocabulary for row[start:], by one forward over the whole row."""
    model = Qwen3.from_state(CONFIG, state)
    with torch.no_grad():
        logits = model.logits(model(torch.tensor(row), [len(row)]))
    return (logits / temperature).log_softmax(-1)[start - 1 : -1]


def gap(
    done: Completion,
    ids: list[int],
    state: dict[str, Tensor],
    *,
    temperature: float = 1.0,
    part: slice = slice(None),
) -> float:
    """Mean gap of a part of the reported logprobs to the model's."""
    expected = logprobs(state, ids + done.token_ids, len(ids), temperature)
    own = expected.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    return (own[part] - torch.tensor(done.logprob)[part]).abs().mean().item()


def wait_for(true: Callable[[], object], what: str, timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


@contextmanager
def under_way(engine: VllmEngine, requests: list[GenerateRequest]) -> Iterator[list[Any]]:
    """Requests that run side by side, each of a client of its own; their futures."""

    def ask(asked: GenerateRequest) -> Completion:
        client = engine.client()
        try:
            return client.generate(asked)
        finally:
            client.close()

    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(ask, asked) for asked in requests]
        wait_for(lambda: engine.stats()["running"] or all(f.done() for f in futures), "running requests")
        yield futures


def server_processes(engine: VllmEngine) -> list[int]:
    """The pids of an engine's group but the front's, of those that live."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != engine.process.pid:
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == engine.process.pid and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_tokens_and_logprobs_are_those_of_the_policy(engine: VllmEngine):
    temperatures = [1.0, 1.0, 0.7, 1.3]
    asked = [request(f"plain-{n}", prompt(20 + 30 * n, n), temperature=t) for n, t in enumerate(temperatures)]
    with under_way(engine, asked) as futures:
        done = [future.result(LONG_S) for future in futures]
    for one, was, temperature in zip(done, asked, temperatures, strict=True):
        assert one.request_id == was.request_id and one.finish_reason == "length"
        assert len(one.token_ids) == len(one.logprob) == len(one.policy_version) == 24
        assert set(one.policy_version) == {0}
        assert gap(one, was.token_ids, START, temperature=temperature) < TOLERANCE
        assert one.logprob == torch.tensor(one.logprob).tolist()  # each a float32 value, exactly


def test_more_requests_and_longer_prompts_than_go_in_at_once_are_all_served(engine: VllmEngine):
    asked = [request(f"many-{n}", prompt(500 + n, 100 + n), max_tokens=8) for n in range(12)]
    with under_way(engine, asked) as futures:
        done = [future.result(LONG_S) for future in futures]
    for one, was in zip(done, asked, strict=True):
        assert one.finish_reason == "length" and gap(one, was.token_ids, START) < TOLERANCE
    stats = engine.stats()
    assert stats["preemptions"] == 0 and stats["kv_reserved_tokens"] == 0 and stats["waiting"] == 0


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: VllmEngine):
    client = engine.client()
    ids = prompt(30, 3)
    done = client.generate(request("top", ids, top_k=3, temperature=0.8))
    client.close()
    whole = logprobs(START, ids + done.token_ids, 30, 0.8)
    three = whole.topk(3).values.logsumexp(-1)
    own = whole.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert (own - three - torch.tensor(done.logprob)).abs().mean() < TOLERANCE
    assert (three < -0.01).any()


def test_a_seed_decides_and_a_stop_token_ends(engine: VllmEngine):
    client = engine.client()
    ids = prompt(40, 4)
    free = client.generate(request("free", ids, seed=2**63 + 5))
    again = client.generate(request("again", ids, seed=2**63 + 5))
    assert again.token_ids == free.token_ids
    stop = free.token_ids[9]
    done = client.generate(request("stop", ids, seed=2**63 + 5, stop_token_ids=[stop]))
    assert done.finish_reason == "stop" and done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(done.logprob) == len(done.token_ids)
    # what the policy's generation_config names as its end ends nothing unless it is asked for
    end = json.loads((CLERK / "generation_config.json").read_text())["eos_token_id"]
    many = [client.generate(request("eos", [1, 2, 3, 4, 5], seed=n, max_tokens=60)) for n in range(4)]
    assert all(one.finish_reason == "length" and len(one.token_ids) == 60 for one in many)
    assert any(end in one.token_ids[:-1] for one in many)
    client.close()


def test_turns_of_a_session_reuse_its_cache_and_the_window_bounds_them(engine: VllmEngine):
    client = engine.client()
    row, before = prompt(100, 5), engine.stats()
    for turn in range(3):
        done = client.generate(request("turns", row, seed=turn))
        assert gap(done, row, START) < TOLERANCE
        row = row + done.token_ids + prompt(7, turn)
    hits = engine.stats()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert hits == (100 + 23) // 32 * 32 + (131 + 23) // 32 * 32
    long = prompt(CONTEXT - 5, 6)
    done = client.generate(request("window", long, max_tokens=50))
    assert done.finish_reason == "length" and len(done.token_ids) == 5
    with pytest.raises(
        EngineError, match=f"^ValueError: token_ids must leave room in the window of {CONTEXT}"
    ):
        client.generate(request("window", prompt(CONTEXT)))
    client.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": [1, 640]}, "token_ids must be a list of ids from 0 to 639, got another value"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": 0.0}, r"temperature must be positive, got 0\.0"),
        ({"top_p": 2.0}, "top_p must be"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(engine: VllmEngine, changes: dict[str, Any], told: str):
    client = engine.client()
    with pytest.raises(EngineError, match=told) as caught:
        client.generate(replace(request("bad", prompt(5)), **changes))
    assert "\n" not in f"{caught.value}"
    assert client.generate(request("bad", prompt(5))).finish_reason == "length"
    client.close()


def test_a_release_ends_what_runs_with_what_it_has(engine: VllmEngine):
    ids = prompt(10, 8)
    control = engine.client()
    with under_way(engine, [request("gone", ids, max_tokens=1000)]) as (future,):
        before = engine.stats()["sampled_tokens"]
        wait_for(lambda: engine.stats()["sampled_tokens"] > before + 20, "tokens")
        control.release("gone")
        done = future.result(LONG_S)
    assert done.finish_reason == "abort" and 20 < len(done.token_ids) < 1000
    assert len(done.logprob) == len(done.policy_version) == len(done.token_ids)
    assert gap(done, ids, START) < TOLERANCE
    control.close()


def test_a_client_that_goes_away_leaves_nothing_running(engine: VllmEngine):
    before = engine.stats()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(engine.address)
    stream.sendall(frame({"op": "generate", **asdict(request("left", prompt(10), max_tokens=1100))}))
    wait_for(lambda: engine.stats()["running"], "a running request")
    stream.close()
    wait_for(lambda: not engine.stats()["running"], "its end", 60.0)
    client = EngineClient(engine.address, deadline=time.monotonic() + 1.0)
    with pytest.raises(TimeoutError):
        client.generate(request("late", prompt(10), max_tokens=1100))
    wait_for(lambda: not engine.stats()["running"], "its end", 60.0)
    after = engine.stats()
    assert after["aborted"] == before["aborted"] + 2 and after["sessions"] == before["sessions"]


def test_weights_change_inside_requests_and_nothing_is_dropped(engine: VllmEngine, tmp_path: Path):
    states = {0: START} | {version: other(version) for version in (1, 2, 3)}
    paths = {version: written(tmp_path, state, f"{version}") for version, state in states.items()}
    prompts = [prompt(20 + n, 30 + n) for n in range(6)]
    asked = [request(f"long-{n}", ids, max_tokens=1000) for n, ids in enumerate(prompts)]
    with under_way(engine, asked) as futures:
        for version in (1, 2, 3):
            before = engine.stats()["sampled_tokens"]
            wait_for(lambda: engine.stats()["sampled_tokens"] > before + 120, "tokens")  # noqa: B023 - at once
            engine.update_weights(version, paths[version], reset_kv=version == 3)
        done = [future.result(LONG_S) for future in futures]
    for one, ids in zip(done, prompts, strict=True):
        assert one.finish_reason == "length" and len(one.token_ids) == len(one.logprob) == 1000
        versions = one.policy_version
        assert versions == sorted(versions) and set(versions) == {0, 1, 2, 3}
        assert gap(one, ids, START, part=slice(versions.index(1))) < TOLERANCE
        # after a change the keys and values of the old weights stay, until they are computed anew
        assert gap(one, ids, states[1], part=slice(versions.index(1), versions.index(2))) > 10 * TOLERANCE
        assert gap(one, ids, states[3], part=slice(versions.index(3), None)) < TOLERANCE
    stats = engine.stats()
    assert stats["policy_version"] == 3 and stats["updates"] == 3
    # the versions that we keep are those that the server tells of each token itself
    assert stats["version_disagreements"] == 0


def test_other_sessions_never_get_what_older_weights_cached(engine: VllmEngine, tmp_path: Path):
    new = other(4)
    client, ids = engine.client(), prompt(200, 50)
    client.generate(request("kept", ids))
    engine.update_weights(4, written(tmp_path, new), reset_kv=False)
    fresh = client.generate(request("fresh", ids))
    assert gap(fresh, ids, new) < TOLERANCE
    mixed = client.generate(request("kept", ids, seed=3))
    assert set(mixed.policy_version) == {4} and gap(mixed, ids, new) > 10 * TOLERANCE
    engine.update_weights(5, written(tmp_path, new), reset_kv=True)
    anew = client.generate(request("kept", ids, seed=3))
    assert set(anew.policy_version) == {5} and gap(anew, ids, new) < TOLERANCE
    client.close()


def test_a_probe_tells_whether_engine_and_trainer_have_the_same_weights(engine: VllmEngine, tmp_path: Path):
    new, row = other(6), prompt(60, 60)
    engine.update_weights(6, written(tmp_path, new), reset_kv=False)
    own = torch.tensor(row[1:])[:, None]
    expected = logprobs(new, row, 1).gather(-1, own)[:, 0].tolist()
    assert probe(engine.address, row, expected, version=6, tolerance=TOLERANCE) < TOLERANCE
    wrong = logprobs(START, row, 1).gather(-1, own)[:, 0].tolist()
    with pytest.raises(EngineError, match=r"^logprobs of engine and trainer must differ by 0\.0001 at most"):
        probe(engine.address, row, wrong, version=6, tolerance=TOLERANCE)
    with pytest.raises(EngineError, match="^engine must have policy_version 7, got 6$"):
        probe(engine.address, row, expected, version=7, tolerance=TOLERANCE)


def missing(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "model.norm.weight"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (missing, "missing: model.norm.weight"),
        (lambda s: {**s, "lm_head.weight": s["model.norm.weight"].clone()}, "unexpected: lm_head.weight"),
        (
            lambda s: {**s, "model.norm.weight": s["model.norm.weight"][:9]},
            r"shape: model.norm.weight \[9\] not \[128\]",
        ),
        (
            lambda s: {**s, "model.norm.weight": s["model.norm.weight"].to(torch.int32)},
            "dtype: model.norm.weight I32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_sent(
    engine: VllmEngine, tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], told: str
):
    before = engine.stats()
    with pytest.raises(EngineError, match=rf"must cover the policy exactly, got {told}$"):
        engine.update_weights(9, written(tmp_path, change(other(9))), reset_kv=False)
    assert engine.fault(0.0) == "" and engine.stats()["updates"] == before["updates"]
    assert engine.stats()["policy_version"] == before["policy_version"]


def test_half_a_file_is_refused(engine: VllmEngine, tmp_path: Path):
    path = Path(written(tmp_path, other(9)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="^ValueError: weights must be a whole file of"):
        engine.update_weights(9, str(path), reset_kv=False)
    path.write_bytes(b"none")
    with pytest.raises(EngineError, match="^ValueError: weights must be a safetensors file, got"):
        engine.update_weights(9, str(path), reset_kv=False)
    with pytest.raises(EngineError, match="^FileNotFoundError"):
        engine.update_weights(9, str(tmp_path / "no"), reset_kv=False)
    assert engine.fault(0.0) == ""


def test_the_log_holds_every_reply(engine: VllmEngine):
    client = engine.client()
    done = client.generate(request("logged", prompt(12, 70)))
    client.close()
    last = json.loads(Path(engine.address).with_name("log.jsonl").read_text().splitlines()[-1])
    assert {name: last[name] for name in Completion.__slots__} == asdict(done)
    assert last["prompt_ids"] == prompt(12, 70) and last["session_id"] == "logged"


def test_a_server_killed_in_the_middle_of_a_request_is_one_line_and_comes_back(engine: VllmEngine):
    with under_way(engine, [request("lost", prompt(10), max_tokens=1100)]) as (future,):
        for pid in server_processes(engine):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises((EngineError, ConnectionError)) as caught:
            future.result(LONG_S)
    assert "\n" not in f"{caught.value}"
    fault = engine.fault(LONG_S)
    assert fault.startswith("vllm must be running, got exit code -9") and "\n" not in fault
    assert engine.fault(0.0) == fault
    # It comes back with another backend and route, since a start takes a minute and the tests below want those.
    assert engine.description["route"] == "direct"
    engine._values |= {"backend": "gloo", "route": "standard"}
    engine.restart()
    assert engine.fault(0.0) == ""
    client, ids = engine.client(), prompt(30, 80)
    done = client.generate(request("back", ids))
    assert set(done.policy_version) == {0} and gap(done, ids, START) < TOLERANCE
    client.close()


def test_a_trainer_broadcasts_its_weights(engine: VllmEngine, tmp_path: Path):
    sender = Sender("gloo", device="cpu", dtype=torch.float32)
    ids, states = prompt(20, 90), {version: other(version) for version in (11, 12)}
    with under_way(engine, [request("sent", ids, max_tokens=900)]) as (future,):
        for version, state in states.items():
            before = engine.stats()["sampled_tokens"]
            wait_for(lambda: engine.stats()["sampled_tokens"] > before + 60, "tokens")  # noqa: B023 - at once
            engine.update_weights(version, sender.offer(version, state), reset_kv=True)
        done = future.result(LONG_S)
    assert set(done.policy_version) == {0, 11, 12} and len(done.token_ids) == 900
    last = done.policy_version.index(12)
    assert gap(done, ids, states[12], part=slice(last, None)) < TOLERANCE
    assert engine.stats()["version_disagreements"] == 0
    offered = sender.offer(13, {k: v for k, v in states[12].items() if k != "model.norm.weight"})
    for weights, told in (
        (offered, "must cover the policy exactly, got missing: model.norm.weight$"),
        (
            offered.replace("/13", "/14"),
            r"refuses: ValueError: version of the weights must be of \[12, 13\], got 14$",
        ),
        (written(tmp_path, START), "^ValueError: weights must come by gloo, the engine's backend, got /"),
    ):
        with pytest.raises(EngineError, match=told):
            engine.update_weights(14 if weights.endswith("/14") else 13, weights, reset_kv=False)
    assert engine.fault(0.0) == "" and engine.stats()["policy_version"] == 12
    sender.close()


def test_a_server_that_hangs_is_ended(engine: VllmEngine):
    with under_way(engine, [request("hung", prompt(10), max_tokens=1100)]) as (future,):
        for pid in server_processes(engine):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises((EngineError, ConnectionError)):
            future.result(3 * STALL_S + LONG_S)
    fault = engine.fault(LONG_S)
    assert fault == f"vllm must sample within {STALL_S:g} s, got nothing: it hangs"
    wait_for(lambda: not server_processes(engine), "the end of its processes")


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path):
    for changes, told in (
        ({"start_s": 1.0}, r"^vllm must start within 1 s, got: "),
        (
            {"extra": ("--no-such-argument",)},
            r"^vllm must start, got exit code 2: .*no-such-argument",
        ),
        ({"python": "/no/python"}, "^FileNotFoundError: .*/no/python"),
    ):
        begun = time.monotonic()
        with pytest.raises(EngineError, match=told) as caught:
            start_vllm_engine(settings(tmp_path, **changes))
        assert "\n" not in f"{caught.value}" and time.monotonic() - begun < LONG_S


def test_a_policy_that_does_not_fit_is_refused_before_anything_is_started(tmp_path: Path):
    record = json.loads((CLERK / "config.json").read_text())
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**record, "num_hidden_layers": 4000, "head_dim": 256}))
    with pytest.raises(EngineError, match="policy must be a folder with a safetensors file, got"):
        start_vllm_engine(settings(tmp_path, policy_dir=str(folder)))
    (folder / "model.safetensors").write_bytes((CLERK / "model.safetensors").read_bytes())
    told = f"^ValueError: kv_gib must hold the {CONTEXT} tokens of max_context, got 1 for 65$"
    with pytest.raises(EngineError, match=told):
        start_vllm_engine(settings(tmp_path, policy_dir=str(folder)))


def test_an_engine_ends_with_its_driver(tmp_path: Path):
    """The front has its parent's death as its own, the server the front's: nothing is left to find."""
    ended = threading.Event()
    started: list[int] = []

    def start() -> None:
        with pytest.raises(EngineError):
            start_vllm_engine(settings(tmp_path, start_s=6.0))
        started.append(1)
        ended.set()

    threading.Thread(target=start, daemon=True).start()
    assert ended.wait(LONG_S) and started
    lines = [line for line in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(line)]
    assert lines == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
