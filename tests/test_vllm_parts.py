"""The parts of the vLLM engine that need no vLLM: headers of weights, who is let in, metrics, settings, HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from system.engine.vllm import Settings
from system.engine.vllm.coverage import Weight, buckets, bytes_of, check_weights, header_of, weights_of
from system.engine.vllm.room import Room
from system.engine.vllm.server import kv_tokens_of, read_metrics
from system.engine.vllm.settings import command, environment, name_plugin
from system.engine.vllm.wire import Refused, Wire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))
from command import vllm_settings

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"

PLAIN: dict[str, Any] = {
    **{"python": sys.executable, "policy_dir": str(CLERK), "socket_path": "/tmp/s", "log_path": "/tmp/l"},
    **{"device": "cuda", "dtype": "bfloat16", "max_context": 800, "max_sessions": 4, "kv_gib": 1.5},
}


def test_a_header_tells_what_the_file_holds(tmp_path: Path):
    state = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros(4)}
    save_file(state, tmp_path / "w.safetensors")
    assert header_of(tmp_path / "w.safetensors") == {"a": Weight("F32", (4,)), "b": Weight("BF16", (2, 3))}
    assert "lm_head.weight" not in weights_of(CLERK) and len(weights_of(CLERK)) == 46


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 40, b'\x05\0\0\0\0\0\0\0{"a":', b"\2\0\0\0\0\0\0\0[]"]
)
def test_what_is_no_file_of_weights_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(ValueError, match="^weights must be a (safetensors|whole) file"):
        header_of(tmp_path / "w")


def test_weights_are_compared_both_ways():
    one, two = Weight("F32", (2,)), Weight("BF16", (3,))
    check_weights({"a": two, "b": one}, {"b": Weight("BF16", (2,)), "a": two}, source="x")
    told = "missing: c; unexpected: d; shape: a [3] not [2]; dtype: b I8"
    with pytest.raises(
        ValueError, match=rf"^weights of x must cover the policy exactly, got {re.escape(told)}$"
    ):
        check_weights(
            {"a": two, "b": Weight("I8", (2,)), "d": one}, {"a": one, "b": one, "c": one}, source="x"
        )
    many = {f"{n:02}": one for n in range(20)}
    with pytest.raises(ValueError, match="missing: 00, 01, 02, 03, 04, 05, 06, 07 and 12 more$"):
        check_weights({}, many, source="x")


@given(sizes=st.lists(st.integers(0, 9), max_size=12), most=st.integers(1, 30))
def test_buckets_hold_every_weight_once_in_order_and_no_more_than_they_may(sizes: list[int], most: int):
    weights = {f"{n}": Weight("F32", (size,)) for n, size in enumerate(sizes)}
    found = buckets(weights, most_bytes=most)
    assert [name for bucket in found for name in bucket] == list(weights)
    for bucket in found:
        assert len(bucket) == 1 or sum(bytes_of(weights[name]) for name in bucket) <= most
    for before, after in zip(found, found[1:]):
        assert sum(bytes_of(weights[name]) for name in [*before, after[0]]) > most


@given(
    wants=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    tokens=st.integers(1, 20),
    most=st.integers(1, 5),
)
def test_requests_are_let_in_in_order_while_they_fit_and_all_of_them_in_the_end(
    wants: list[int], tokens: int, most: int
):
    async def run() -> list[int]:
        room, entered = Room(tokens, most), list[int]()

        async def one(number: int, want: int) -> None:
            await room.enter(want)
            entered.append(number)
            assert room.inside <= most and (room.taken <= tokens or room.inside == 1)
            await asyncio.sleep(0)
            room.leave(want)

        async with asyncio.timeout(60):
            await asyncio.gather(*(one(number, want) for number, want in enumerate(wants)))
        assert (room.taken, room.inside, room.waiting) == (0, 0, 0)
        return entered

    assert asyncio.run(run()) == list(range(len(wants)))


def test_nobody_is_let_in_while_weights_change_and_who_gives_up_takes_no_room():
    async def run() -> None:
        room = Room(10, 4)
        room.close()
        first, second = (asyncio.create_task(room.enter(8)) for _ in range(2))
        await asyncio.sleep(0)
        assert room.waiting == 2 and room.taken == 0
        first.cancel()
        await asyncio.sleep(0)
        room.open()
        await second
        assert room.taken == 8 and room.waiting == 0
        third = asyncio.create_task(room.enter(8))
        await asyncio.sleep(0)
        room.leave(8)
        third.cancel()  # let in, and gone before it knows
        await asyncio.wait([third])
        assert (room.taken, room.inside) == (0, 0)

    asyncio.run(run())


def test_metrics_are_added_up_over_their_labels():
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="p"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="p"} 2.0\n'
        'vllm:generation_tokens_total{engine="0"} 1.2e+03\n'
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0\n'
    )
    told = read_metrics(text)
    assert told["running"] == 5 and told["sampled_tokens"] == 1200 and told["waiting"] == 0
    assert kv_tokens_of(text) == 1600 and kv_tokens_of("") == 0


def test_a_server_is_told_everything_that_matters(tmp_path: Path):
    settings = Settings(**PLAIN, gpus=(3,), tensor_parallel=1)
    words = " ".join(command(settings))
    for said in (
        "--generation-config vllm",
        "--logprobs-mode processed_logprobs",
        "--max-model-len 800",
        "--max-num-seqs 4",
        f"--kv-cache-memory-bytes {3 << 29}",
        "--dtype bfloat16",
    ):
        assert said in words
    env = environment(settings, name_plugin(tmp_path), {"PYTHONPATH": "/a", "HOME": "/h"})
    assert env["CUDA_VISIBLE_DEVICES"] == "3" and env["HOME"] == "/h"
    assert env["PYTHONPATH"].split(os.pathsep)[::2] == [str(tmp_path), "/a"]
    assert "system.engine.vllm.inside:register" in next(tmp_path.glob("*/entry_points.txt")).read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kv_gib": 0.0}, "kv_gib must be positive, got 0.0"),
        ({"device": "cpu"}, "kv_gib must be whole on the CPU, got 1.5"),
        ({"gpus": (1, 2)}, r"gpus must be 1 for tensor_parallel, got \[1, 2\]"),
        ({"max_context": 1}, "max_context must be at least 2, got 1"),
        ({"max_sessions": 0}, "max_sessions must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=f"^{told}$"):
        Settings(**{**PLAIN, **change})


def test_a_run_reads_its_settings_from_a_file(tmp_path: Path):
    file = tmp_path / "vllm.json"
    given = {"python": "p", "dtype": "bfloat16", "kv_gib": 60, "gpus": [0, 1], "tensor_parallel": 2}
    file.write_text(json.dumps(given))
    assert vllm_settings("vllm", file) == given and vllm_settings("embedded", None) is None
    for engine, path, text, told in (
        ("embedded", file, "{}", "vllm must go with engine vllm, got"),
        ("vllm", None, "{}", "engine vllm must have its settings in a file, got none"),
        ("vllm", file, "[", "vllm must be a file of settings as JSON, got"),
        ("vllm", file, '{"kv": 1}', "vllm must be a file of settings as JSON, got"),
        (
            "vllm",
            file,
            '{"python": "p", "dtype": "float32", "device": "cpu"}',
            "device must be the run's own",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            vllm_settings(engine, path)


def test_http_answers_are_read_whole_and_connections_are_used_again(tmp_path: Path):
    path = str(tmp_path / "s")
    met: list[int] = []
    long = json.dumps({"ids": list(range(40_000))}).encode()
    answers = {
        b"/length": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(long), long),
        b"/chunks": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'5\r\n{"a":\r\n3\r\n 1}\r\n0\r\n\r\n',
        b"/none": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"/bad": b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b'Content-Length: 37\r\n\r\n{"error": {"message": "not \\n so"}}   ',
        b"/ends": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(1)
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            size = int(re.search(rb"Content-Length: (\d+)", head)[1])  # pyright: ignore[reportOptionalSubscript]
            await reader.readexactly(size)
            target = head.split(b" ")[1]
            writer.write(answers[target])
            if target in (b"/bad", b"/ends"):
                writer.close()
                return
            await writer.drain()

    async def run() -> None:
        server = await asyncio.start_unix_server(serve, path)
        wire = Wire(path)
        assert await wire.call("POST", "/length", {"x": 1}, timeout_s=60) == {"ids": list(range(40_000))}
        assert await wire.call("GET", "/chunks", timeout_s=60) == {"a": 1}
        assert await wire.call("GET", "/none", timeout_s=60) == ""
        assert len(met) == 1
        with pytest.raises(Refused, match="^not so$"):
            await wire.call("GET", "/bad", timeout_s=60)
        with pytest.raises(ConnectionError):
            await wire.call("GET", "/ends", timeout_s=60)
        assert await wire.call("GET", "/none", timeout_s=60) == "" and len(met) == 3
        wire.close()
        server.close()
        await asyncio.sleep(0.1)  # for both ends of the connections

    asyncio.run(run())
