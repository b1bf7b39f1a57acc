"""The embedded engine as its clients see it: a process behind a socket."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.counter import counter_uniform
from system.engine import (
    Completion,
    EngineClient,
    EngineError,
    EngineHandle,
    GenerateRequest,
    check_reply,
    start_embedded_engine,
)
from system.engine.batch import LARGEST_DRAW, Batch, common_prefix, sample
from system.engine.cached import CachedModel
from system.model import ModelConfig, Qwen3, random_state
from system.policy import load_policy, save_policy, save_weights
from tests.test_model import large_norms, write_tokenizer

CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    token_count=60,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
CONTEXT = 200


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tokenizer(folder, CONFIG.token_count)
    save_policy(folder, CONFIG, large_norms(CONFIG, 0))
    return folder


@pytest.fixture(scope="module")
def engine(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    folder = tmp_path_factory.mktemp("engine")
    handle = start_embedded_engine(policy_dir, folder / "s", folder / "log.jsonl", CONTEXT, 8, 1, "cpu")
    yield handle
    handle.close()


def request(name: str, token_ids: list[int], **changes: object) -> GenerateRequest:
    plain = GenerateRequest(
        request_id=f"{name}/{len(token_ids)}",
        session_id=name,
        token_ids=token_ids,
        max_tokens=20,
        stop_token_ids=[5],
        seed=11,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, CONFIG.token_count, (length,), generator=generator).tolist()


MODELS: dict[int, tuple[dict, Qwen3]] = {}
"""By identity of the weights, which are kept so that the identity stays theirs."""


def full_logprob(state: dict, row: list[int], start: int, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of row[start:] by one forward over the whole row."""
    if id(state) not in MODELS:
        MODELS[id(state)] = (state, Qwen3.from_state(CONFIG, state))
    model = MODELS[id(state)][1]
    with torch.no_grad():
        logprob = (model.logits(model(torch.tensor(row), [len(row)])) / temperature).log_softmax(-1)
    return [logprob[i - 1, row[i]].item() for i in range(start, len(row))]


def mean_gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def test_reported_logprobs_are_those_of_the_full_forward(engine: EngineHandle, policy_dir: Path):
    _, state = load_policy(policy_dir)
    with_client = engine.client()
    for temperature in (1.0, 0.7):
        ids = prompt(50)
        done = with_client.generate(
            request("plain", ids, temperature=temperature, stop_token_ids=[], max_tokens=40)
        )
        assert done.finish_reason == "length" and len(done.token_ids) == 40
        assert len(done.logprob) == len(done.policy_version) == 40 and set(done.policy_version) == {0}
        expected = full_logprob(state, ids + done.token_ids, 50, temperature)
        assert mean_gap(done.logprob, expected) < 1e-5
        with_client.release("plain")
    with_client.close()


def test_session_turns_reuse_the_cache_and_change_nothing(engine: EngineHandle, policy_dir: Path):
    _, state = load_policy(policy_dir)
    client = engine.client()
    row = prompt(40, 3)
    before = client.stats()
    for turn in range(3):
        done = client.generate(request("turns", row, seed=turn, stop_token_ids=[]))
        assert mean_gap(done.logprob, full_logprob(state, row + done.token_ids, len(row))) < 1e-5
        row = row + done.token_ids + prompt(7, turn)
    after = client.stats()
    assert after["reused_tokens"] - before["reused_tokens"] == (40 + 19) + (40 + 19 + 27)
    # an edited history is cached again from the first difference
    edited = row[:30] + [row[30] ^ 1] + row[31:]
    done = client.generate(request("turns", edited, stop_token_ids=[]))
    assert mean_gap(done.logprob, full_logprob(state, edited + done.token_ids, len(edited))) < 1e-5
    assert client.stats()["reused_tokens"] - after["reused_tokens"] == 30
    client.close()


def test_stop_token_is_included_and_finishes(engine: EngineHandle):
    client = engine.client()
    free = client.generate(request("free", prompt(20), stop_token_ids=[], max_tokens=30))
    stop = free.token_ids[9]
    at = free.token_ids.index(stop)
    done = client.generate(request("stopped", prompt(20), stop_token_ids=[stop], max_tokens=30))
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: at + 1]
    client.close()


def test_seed_decides_whatever_else_is_in_the_batch(engine: EngineHandle):
    alone = engine.client()
    expected = {s: alone.generate(request(f"alone{s}", prompt(30, s), seed=s)) for s in range(6)}
    got: dict[int, Completion] = {}

    def ask(seed: int) -> None:
        client = engine.client()
        got[seed] = client.generate(request(f"crowd{seed}", prompt(30, seed), seed=seed))
        client.close()

    threads = [threading.Thread(target=ask, args=(s,)) for s in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, done in expected.items():
        assert got[seed].token_ids == done.token_ids
        assert mean_gap(got[seed].logprob, done.logprob) < 1e-5
    assert len({tuple(done.token_ids) for done in expected.values()}) > 1
    alone.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 on fork
def test_more_clients_than_slots_are_all_served(engine: EngineHandle, policy_dir: Path):
    _, state = load_policy(policy_dir)
    pids = []
    parent_client = engine.client()
    parent_client.stats()  # connected before the fork on purpose
    for i in range(20):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                row = prompt(30) if i % 2 else prompt(25, i)  # half of them share a prompt
                for turn in range(2):
                    done = parent_client.generate(
                        request(f"many{i}", row, seed=100 * i + turn, stop_token_ids=[])
                    )
                    start, row = len(row), row + done.token_ids
                    if mean_gap(done.logprob, full_logprob(state, row, start)) > 1e-5:
                        os._exit(2)
                    row = row + prompt(5, turn)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 20
    stats = parent_client.stats()
    assert stats["shared_tokens"] > 0
    assert stats["running"] == stats["waiting"] == 0
    deadline = time.monotonic() + 5
    while parent_client.stats()["sessions"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert parent_client.stats()["sessions"] == 0  # they left without releasing
    parent_client.close()


def test_weights_change_inside_a_request(engine: EngineHandle, policy_dir: Path, tmp_path: Path):
    _, old = load_policy(policy_dir)
    new = large_norms(CONFIG, 9)
    save_weights(tmp_path / "w.safetensors", new)
    save_weights(tmp_path / "old.safetensors", old)
    done: list[Completion] = []
    ids = prompt(10)

    def ask() -> None:
        client = engine.client()
        done.append(client.generate(request("long", ids, stop_token_ids=[], max_tokens=190)))
        client.close()

    control = engine.client()
    thread = threading.Thread(target=ask)
    thread.start()
    while not control.stats()["running"]:
        pass
    control.update_weights(4, tmp_path / "w.safetensors", reset_kv=True)
    thread.join()
    versions = done[0].policy_version
    assert versions == sorted(versions) and set(versions) == {0, 4}
    assert done[0].finish_reason == "length" and len(versions) == 190
    change = versions.index(4)
    row = ids + done[0].token_ids
    assert mean_gap(done[0].logprob[:change], full_logprob(old, row, 10)[:change]) < 1e-5
    # the cache was computed again, so the rest is what the new weights alone say
    assert mean_gap(done[0].logprob[change:], full_logprob(new, row, 10)[change:]) < 1e-5
    # without reset_kv an idle session keeps what the old weights cached; the version is the sampler's
    ids = prompt(40, 5)
    control.generate(request("kept", ids, stop_token_ids=[]))
    control.update_weights(5, tmp_path / "old.safetensors")
    # and what the old weights cached is never copied to another session
    fresh = control.generate(request("fresh", ids, stop_token_ids=[]))
    assert mean_gap(fresh.logprob, full_logprob(old, ids + fresh.token_ids, 40)) < 1e-5
    mixed = control.generate(request("kept", ids, stop_token_ids=[], seed=3))
    assert set(mixed.policy_version) == {5}
    assert mean_gap(mixed.logprob, full_logprob(old, ids + mixed.token_ids, 40)) > 1e-3
    control.update_weights(0, tmp_path / "old.safetensors", reset_kv=True)
    control.close()


def test_weights_that_do_not_cover_the_model_are_refused_whole(engine: EngineHandle, tmp_path: Path):
    client = engine.client()
    before = client.generate(request("same", prompt(20)))
    state = random_state(CONFIG, seed=1)
    state["d"] = state.pop("model.norm.weight")
    save_weights(tmp_path / "names", state)
    with pytest.raises(EngineError, match="missing: model.norm.weight; unexpected: d"):
        client.update_weights(1, tmp_path / "names")
    save_file({n: v.bfloat16() for n, v in random_state(CONFIG, seed=1).items()}, tmp_path / "narrow")
    with pytest.raises(EngineError, match="dtype: model.embed_tokens.weight torch.bfloat16"):
        client.update_weights(1, tmp_path / "narrow")
    wider = replace(CONFIG, hidden_size=40)
    save_weights(tmp_path / "wider", random_state(wider, seed=1))
    with pytest.raises(EngineError, match=r"shape: model.embed_tokens.weight \(64, 40\) not \(64, 32\)"):
        client.update_weights(1, tmp_path / "wider")
    poisoned = random_state(CONFIG, seed=1)
    poisoned["model.norm.weight"][3] = float("nan")
    save_weights(tmp_path / "nan", poisoned)
    with pytest.raises(EngineError, match="weights must be finite, got NaN or infinity in model.norm.weight"):
        client.update_weights(1, tmp_path / "nan")
    with pytest.raises(EngineError, match="nowhere"):
        client.update_weights(1, tmp_path / "nowhere")
    client.release("same")
    assert client.generate(request("same", prompt(20))) == before
    assert client.stats()["policy_version"] == 0
    client.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top_p": 0.9}, "top_p must be 1, .* got 0.9"),
        ({"top_k": 20}, "top_k must be -1, .* got 20"),
        ({"min_p": 0.1}, "min_p must be 0, .* got 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must be 1, .* got 1.1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"token_ids": []}, "token_ids must not be empty"),
        ({"token_ids": [60]}, "token_ids must be a list of ids from 0 to 59"),
        ({"token_ids": [1] * CONTEXT}, f"room in the window of {CONTEXT} tokens, got {CONTEXT}"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"session_id": ""}, "session_id must be a text that is not empty"),
    ],
)
def test_refusals_are_one_line_with_name_rule_and_value(engine: EngineHandle, changes: dict, told: str):
    client = engine.client()
    with pytest.raises(EngineError, match=told) as raised:
        client.generate(replace(request("bad", prompt(5)), **changes))
    assert "\n" not in str(raised.value)
    assert client.generate(request("good", prompt(5))).token_ids
    client.close()


def test_max_tokens_is_bound_by_the_window(engine: EngineHandle):
    client = engine.client()
    done = client.generate(request("window", prompt(CONTEXT - 7), stop_token_ids=[], max_tokens=1000))
    assert (done.finish_reason, len(done.token_ids)) == ("length", 7)
    client.close()


def raw_call(engine: EngineHandle, body: bytes) -> dict:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(engine.socket_path)
        stream.sendall(struct.pack("!I", len(body)) + body)
        (length,) = struct.unpack("!I", stream.recv(4))
        return json.loads(stream.recv(length))


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b"[1]", b'{"op":"sing"}', b'{"op":"generate","request_id":"x"}', b'{"op":"release"}'],
)
def test_malformed_messages_get_a_line_and_the_engine_lives_on(engine: EngineHandle, body: bytes):
    reply = raw_call(engine, body)
    assert list(reply) == ["error"] and "\n" not in reply["error"]
    assert engine.alive()


def test_unset_sampling_fields_are_not_filled_in(engine: EngineHandle):
    message = {"op": "generate", **asdict(request("unset", prompt(5)))}
    del message["top_k"]
    assert "missing ['top_k']" in raw_call(engine, json.dumps(message).encode())["error"]


def test_a_client_that_goes_away_is_dropped_and_leaks_nothing(engine: EngineHandle):
    control = engine.client()
    aborted = control.stats()["aborted"]
    for i in range(3):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(engine.socket_path)
        message = {
            "op": "generate",
            **asdict(request(f"gone{i}", prompt(10, i), stop_token_ids=[], max_tokens=190)),
        }
        body = json.dumps(message).encode()
        stream.sendall(struct.pack("!I", len(body)) + body)
        stream.close()
    deadline = time.monotonic() + 5
    while control.stats()["aborted"] < aborted + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = control.stats()
    assert (stats["aborted"], stats["running"], stats["waiting"]) == (aborted + 3, 0, 0)
    control.close()


def test_log_equals_the_replies_bit_for_bit(engine: EngineHandle):
    client = engine.client()
    asked = [request(f"log{i}", prompt(12 + i), seed=i) for i in range(3)]
    replies = [client.generate(one) for one in asked]
    lines = [
        json.loads(line) for line in Path(engine.socket_path).with_name("log.jsonl").read_text().splitlines()
    ]
    logged = {line["request_id"]: line for line in lines}
    for one, reply in zip(asked, replies, strict=True):
        line = logged[one.request_id]
        assert line["prompt_ids"] == one.token_ids and line["session_id"] == one.session_id
        assert {name: line[name] for name in Completion.__slots__} == asdict(reply)
        assert all(lp == torch.tensor(lp, dtype=torch.float32).item() for lp in reply.logprob)
    client.close()


def test_engine_dies_with_its_parent_and_ignores_interrupts(policy_dir: Path, tmp_path: Path):
    code = (
        "import sys, time\n"
        "import system.trainer\n"
        "from system.engine import start_embedded_engine\n"
        "assert 'torch' not in sys.modules\n"
        "policy, socket, log = sys.argv[1:]\n"
        "h = start_embedded_engine(policy, socket, log, 64, 2, 1, 'cpu')\n"
        "print(h.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    paths = [str(policy_dir), str(tmp_path / "s"), str(tmp_path / "l")]
    parent = subprocess.Popen([sys.executable, "-c", code, *paths], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 2)
    client = EngineClient(tmp_path / "s")
    assert client.stats()["policy_version"] == 0
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    client.close()


def test_a_policy_that_does_not_load_is_one_line(tmp_path: Path):
    with pytest.raises(EngineError, match="policy folder must have config.json, got .* without it"):
        start_embedded_engine(tmp_path, tmp_path / "s", tmp_path / "l", 64, 2, 1, "cpu")


def test_release_while_running_replies_abort():
    batch = Batch(CachedModel(CONFIG, large_norms(CONFIG, 0), max_context=64, slots=3), version=2)
    for i in range(4):
        batch.submit(request(f"s{i}", prompt(8, i), stop_token_ids=[]), None)
    with pytest.raises(ValueError, match="session_id must have one request at a time"):
        batch.submit(request("s1", prompt(9)), None)
    assert batch.step() == []
    assert (batch.running, len(batch.waiting)) == (3, 1)
    [(_, done)] = batch.release("s0")
    assert done.finish_reason == "abort" and len(done.token_ids) == len(done.policy_version) == 2
    [(_, done)] = batch.release("s3")
    assert done.finish_reason == "abort" and done.token_ids == []
    names = set()
    while batch.running:
        names |= {done.request_id for _, done in batch.step()}
    assert names == {"s1/8", "s2/8"}
    assert [slot.session_id for slot in batch.slots].count(None) == 1


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_keeps_every_row_exact(seed: int):
    """Turns, releases, evictions, shared prefixes, edits and weight swaps at random over few slots."""
    random = Random(seed)
    states = [large_norms(CONFIG, 20), large_norms(CONFIG, 21)]
    batch = Batch(CachedModel(CONFIG, states[0], max_context=90, slots=4), version=0)
    trunk = prompt(30, 99)
    rows: dict[str, list[int]] = {}
    busy: set[str] = set()
    checked = 0
    for event in range(300):
        kind = random.random()
        if kind < 0.25 and len(busy) < 7:
            name = f"s{random.randrange(9)}"
            if name not in busy:
                row = rows.get(name) or trunk[: random.choice([5, 20, 30])] + prompt(
                    random.randrange(1, 9), event
                )
                if random.random() < 0.2:
                    row = row[:-2] + [row[-2] ^ 1, row[-1]]
                if len(row) > 70:
                    row = prompt(4, event)
                most = random.randrange(1, 15)
                batch.submit(
                    request(name, row, seed=event, max_tokens=most, temperature=random.choice([1.0, 0.8])), 0
                )
                busy.add(name)
        elif kind < 0.30 and rows:
            name = random.choice(sorted(rows))
            batch.release(name)
            busy.discard(name)
        elif kind < 0.32:
            version = batch.version + 1
            batch.update(version, states[version % 2], reset_kv=True)
        else:
            for run, done in batch.step():
                name, temperature = run.request.session_id, run.request.temperature
                busy.discard(name)
                row = run.request.token_ids + done.token_ids
                rows[name] = row + prompt(random.randrange(0, 6), event)
                for version in set(done.policy_version):
                    expected = full_logprob(states[version % 2], row, len(run.request.token_ids), temperature)
                    for got, wanted, at in zip(done.logprob, expected, done.policy_version, strict=True):
                        assert at != version or abs(got - wanted) < 1e-4
                checked += 1
        named = [slot.session_id for slot in batch.slots if slot.session_id is not None]
        assert len(named) == len(set(named))
        assert [slot.run is not None for slot in batch.slots] == [i < batch.running for i in range(4)]
    assert checked > 30
    assert min(batch.counters[n] for n in ("shared_tokens", "reused_tokens", "aborted")) > 0


def test_sampling_is_the_inverse_cdf_and_reports_the_sampled_token():
    logits = torch.tensor([[2.0, 0.0]]).repeat(2, 1)
    draw = torch.tensor([[0.5], [0.99]], dtype=torch.float64)
    token, logprob = sample(logits, torch.tensor([[0.5], [0.5]]), draw)
    assert token.tolist() == [0, 1]
    assert logprob.tolist() == pytest.approx([-0.01815, -4.01815], abs=1e-5)
    forbidden = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for u in (1e-15, 0.5, LARGEST_DRAW):
        assert sample(forbidden, None, torch.tensor([[u]], dtype=torch.float64))[0].tolist() == [1]


def test_each_position_of_each_seed_has_its_own_draw():
    state = random_state(CONFIG, seed=0)
    state["model.embed_tokens.weight"].zero_()  # tied to the head: every token is equally likely
    batch = Batch(CachedModel(CONFIG, state, max_context=64, slots=2), version=0)
    for name, seed in (("a", 1), ("b", 2)):
        batch.submit(request(name, prompt(8), seed=seed, stop_token_ids=[], max_tokens=30), None)
    done = {}
    while batch.running or batch.waiting:
        done |= {run.request.seed: completion for run, completion in batch.step()}
    for seed in (1, 2):
        draws = [counter_uniform(seed, position) for position in range(8, 38)]
        assert done[seed].token_ids == [int(draw * CONFIG.token_count) for draw in draws]
        assert done[seed].logprob == pytest.approx([-math.log(CONFIG.token_count)] * 30)


def test_common_prefix_finds_the_first_difference():
    for at in range(9):
        other = [7] * 8
        if at < 8:
            other[at] = 1
        assert common_prefix([7] * 8, other) == at
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"request_id": "other"}, "request_id of a reply must be r1, got other"),
        ({"token_ids": []}, "a reply must have 1 to 3 token_ids, got 0"),
        ({"token_ids": [1, 2, 3, 5]}, "a reply must have 1 to 3 token_ids, got 4"),
        ({"token_ids": None}, "a reply must have 1 to 3 token_ids, got NoneType"),
        ({"token_ids": [9, 5]}, "token_ids of a reply must be from 0 to 8, got 9"),
        ({"token_ids": [-1, 5]}, "token_ids of a reply must be from 0 to 8, got -1"),
        ({"token_ids": [True, 5]}, "token_ids of a reply must be from 0 to 8, got True"),
        ({"token_ids": [1, 2]}, "a reply that stops must end with a stop token, got 2"),
    ],
)
def test_a_reply_that_no_engine_may_give_is_refused(change: dict[str, Any], text: str):
    asked = request("s1", prompt(4), request_id="r1", max_tokens=3, stop_token_ids=[5])
    plain = {"token_ids": [8, 5], "logprob": [-0.5] * 2, "policy_version": [3] * 2, "finish_reason": "stop"}
    good = Completion(**({"request_id": "r1"} | plain))  # type: ignore[arg-type]
    check_reply(asked, good, vocabulary=9)
    check_reply(asked, replace(good, token_ids=[1, 2, 3], finish_reason="length"), vocabulary=9)
    with pytest.raises(EngineError, match=re.escape(text)):
        check_reply(asked, replace(good, **change), vocabulary=9)
