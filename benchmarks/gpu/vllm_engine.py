"""How exact is vLLM behind our front on a GPU, what does an update in flight cost, how fast is it beside vLLM alone?

    python -m benchmarks.gpu.vllm_engine --out $OUT

On one GPU with vLLM 0.24 or newer on the path, no network: makes a random Qwen3 of 100 million parameters, starts one
server through `start_vllm_engine`, and goes through its parts, each with a time of its own; a part that fails is told
in its line and the next one goes on. Lines of JSON in `vllm_engine.jsonl`, logs beside it, the table on the screen.

Weights come through the backend "file" of our plugin, over vLLM's own routes: two ranks of NCCL must not share a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from system.engine import Completion, EngineClient, GenerateRequest
from system.engine.vllm import Settings, probe, start_vllm_engine
from system.engine.vllm.engine import VllmEngine
from system.model import Qwen3, config_from_huggingface, parameter_count, random_state
from system.policy import save_weights

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
TRIALS, TURNS, COMMON, OWN, SAMPLED, OBSERVED = 256, 5, 128, 256, 192, 96
"""Of the speed: trials side by side, turns of each; tokens of the common beginning, of the task, of a turn and of a
tool's answer. Four fifths of the requests are then continuations, as in office work."""

LONG = 1500
"""Tokens of each request that updates meet."""

CLIENTS = 16
"""Processes that the trials are spread over."""

DEVICE, DTYPE = "cuda", "bfloat16"

if os.environ.get("REHEARSAL"):  # every line of it on a CPU, in minutes; the numbers mean nothing
    DTYPE = "float32"  # vLLM's bfloat16 on a CPU wants instructions that not every one has
    DEVICE, TRIALS, TURNS, COMMON, OWN, SAMPLED, OBSERVED, LONG, CLIENTS = "cpu", 8, 3, 32, 32, 16, 16, 400, 4
    CONFIG |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 640}
    CONFIG |= {"max_position_embeddings": 1024}


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """TimeoutError in this thread after so long."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def state_of(seed: int) -> dict[str, torch.Tensor]:
    """Weights with logits far enough from flat that an error would show, rounded to bfloat16."""
    config = config_from_huggingface(CONFIG)
    return {name: value.bfloat16() for name, value in random_state(config, seed=seed, scale=0.05).items()}


def request(name: str, ids: list[int], **changes: Any) -> GenerateRequest:
    told: dict[str, Any] = {
        "request_id": f"{name}/{len(ids)}",
        "session_id": name,
        "token_ids": ids,
        "max_tokens": 64,
        "stop_token_ids": [],
        "seed": len(ids),
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **changes,
    }
    return GenerateRequest(**told)


def ids_of(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(CONFIG["vocab_size"]) for _ in range(count)]


class Judge:
    """The same weights in our model, in bfloat16 on the GPU, and in transformers where it is there."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path) -> None:
        config = config_from_huggingface(CONFIG)
        self.models: dict[str, Any] = {}
        own = Qwen3.from_state(config, state, dtype=getattr(torch, DTYPE), device=DEVICE).requires_grad_(
            False
        )
        self.models["ours"] = lambda row: own.logits(own(torch.tensor(row, device=DEVICE), [len(row)]))
        try:
            from transformers import Qwen3ForCausalLM

            theirs: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE))
            theirs = theirs.to(DEVICE).eval()
            theirs.load_state_dict(state, strict=False)
            self.models["transformers"] = lambda row: theirs(torch.tensor([row], device=DEVICE)).logits[0]
        except Exception as error:  # noqa: BLE001 - told, and ours is judge enough
            print(f"transformers: {error}", file=sys.stderr)

    @torch.no_grad()
    def gaps(
        self, ids: list[int], done: Completion, temperature: float, part: slice = slice(None)
    ) -> dict[str, list[float]]:
        """|difference| of each reported logprob of a part, by judge."""
        row, found = ids + done.token_ids, {}
        for name, logits in self.models.items():
            logprob = (logits(row)[len(ids) - 1 : -1].float() / temperature).log_softmax(-1)
            own = logprob.gather(-1, torch.tensor(done.token_ids, device=DEVICE)[:, None])[:, 0].cpu()
            found[name] = (own[part] - torch.tensor(done.logprob)[part]).abs().tolist()
        return found

    @torch.no_grad()
    def row(self, row: list[int]) -> list[float]:
        """Log-probability of every token but the first."""
        logprob = self.models["ours"](row)[:-1].float().log_softmax(-1)
        return logprob.gather(-1, torch.tensor(row[1:], device=DEVICE)[:, None])[:, 0].tolist()


def told(gaps: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Mean and largest gap, by judge."""
    found: dict[str, Any] = {}
    for name in gaps[0]:
        every = [gap for one in gaps for gap in one[name]]
        found |= {
            f"mean_gap_{name}": sum(every) / len(every),
            f"largest_gap_{name}": max(every),
            "tokens": len(every),
        }
    return found


def all_of(engine: VllmEngine, asked: list[GenerateRequest]) -> list[Completion]:
    """Requests side by side, each of a client of its own."""

    def ask(one: GenerateRequest) -> Completion:
        client = engine.client()
        try:
            return client.generate(one)
        finally:
            client.close()

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def exactness(engine: VllmEngine, state: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Reported logprobs against both models, at two temperatures."""
    judge, found = Judge(state, folder), {}
    for temperature in (1.0, 0.7):
        asked = [
            request(f"x{temperature}-{n}", ids_of(f"x{n}", 100 + 40 * n), temperature=temperature)
            for n in range(16)
        ]
        done = all_of(engine, asked)
        gaps = [judge.gaps(one.token_ids, reply, temperature) for one, reply in zip(asked, done, strict=True)]
        found |= {f"{name}_at_{temperature:g}": value for name, value in told(gaps).items()}
    return found


def updates(engine: VllmEngine, folder: Path, shared: Path) -> dict[str, Any]:
    """Three updates while requests run, the last with the caches computed anew; then exactness of the new weights."""
    states = {version: state_of(100 + version) for version in (1, 2, 3)}
    paths = {version: shared / f"{version}.safetensors" for version in states}
    for version, state in states.items():
        save_weights(paths[version], state)
    asked = [request(f"u{n}", ids_of(f"u{n}", 200), max_tokens=LONG, seed=n) for n in range(TRIALS)]
    done: list[Completion] = []
    running = threading.Thread(target=lambda: done.extend(all_of(engine, asked)))
    before = engine.stats()
    running.start()
    seconds = []
    for version, path in paths.items():
        start = engine.stats()["sampled_tokens"]
        while engine.stats()["sampled_tokens"] < start + TRIALS * LONG // 10 and running.is_alive():
            time.sleep(0.05)
        begun = time.perf_counter()
        engine.update_weights(version, str(path), reset_kv=version == 3)
        seconds.append(time.perf_counter() - begun)
    running.join()
    after = engine.stats()
    versions = [one.policy_version for one in done]
    judge = Judge(states[3], folder)
    changed = [(one, reply) for one, reply in zip(asked, done, strict=True) if 3 in reply.policy_version][:24]
    gaps = [
        judge.gaps(one.token_ids, reply, 1.0, slice(reply.policy_version.index(3), None))
        for one, reply in changed
    ]
    row = ids_of("probe", 200)
    engine_probe = probe(engine.address, row, judge.row(row), version=3, tolerance=0.05)
    return {
        "requests": len(asked),
        "dropped": sum(len(one.token_ids) != LONG or one.finish_reason != "length" for one in done),
        "changed_inside": sum(len(set(one)) > 1 for one in versions),
        "all_four_versions": sum(set(one) == {0, 1, 2, 3} for one in versions),
        "in_order": all(one == sorted(one) for one in versions),
        "version_disagreements": after["version_disagreements"],
        "update_s": seconds,
        "pause_s": (after["pause_s"] - before["pause_s"]) / 3,
        "weights_gb": paths[1].stat().st_size / 1e9,
        "probe_mean_gap": engine_probe,
        **{f"{name}_after_reset": value for name, value in told(gaps).items()},
    }


def trial(address: str, number: int, name: str, turns: int) -> list[dict[str, Any]]:
    """A scripted trial of several turns; what it asked and got."""
    client, requests = EngineClient(address), []
    row = ids_of("common", COMMON) + ids_of(f"{name}{number}", OWN)
    for turn in range(turns):
        asked = request(f"{name}{number}", row, max_tokens=SAMPLED, seed=number * 100 + turn)
        done = client.generate(asked)
        requests.append({"turn": turn, "prompt": row, "seed": asked.seed, "sampled": len(done.token_ids)})
        row = row + done.token_ids + ids_of(f"{name}{number}/{turn}", OBSERVED)
    client.release(f"{name}{number}")
    client.close()
    return requests


def trials(address: str, numbers: list[int], name: str, turns: int, into: Any) -> None:
    """Some trials side by side, in a process of their own."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        into.put(
            [one for lines in pool.map(lambda n: trial(address, n, name, turns), numbers) for one in lines]
        )


def through_the_front(address: str, name: str, turns: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of all trials, and their requests."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    parts = [list(range(TRIALS))[part::CLIENTS] for part in range(CLIENTS)]
    begun = time.perf_counter()
    workers = [context.Process(target=trials, args=(address, part, name, turns, queue)) for part in parts]
    for worker in workers:
        worker.start()
    requests = [one for _ in workers for one in queue.get(timeout=280)]
    seconds = time.perf_counter() - begun
    for worker in workers:
        worker.join(10)
    return seconds, requests


def speed(engine: VllmEngine, out: Path) -> dict[str, Any]:
    """256 concurrent trials of several turns through our path; their requests are kept for vLLM alone."""
    through_the_front(engine.address, "warm", 2)
    before = engine.stats()
    seconds, requests = through_the_front(engine.address, "timed", TURNS)
    after = engine.stats()
    (out / "requests.json").write_text(json.dumps(requests))
    sampled = sum(one["sampled"] for one in requests)
    hit = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    return {
        "trials": TRIALS,
        "requests": len(requests),
        "sampled_tokens": sampled,
        "prompt_tokens": sum(len(one["prompt"]) for one in requests),
        "prefix_hit_share": hit / max(1, after["prefix_asked_tokens"] - before["prefix_asked_tokens"]),
        "preemptions": after["preemptions"] - before["preemptions"],
        "seconds": seconds,
        "tokens_per_second": sampled / seconds,
    }


def offline(policy: str, compiled: bool, kv_gib: float, requests_path: str) -> None:
    """vLLM alone in this process on the same requests: all at once, and turn by turn. One JSON line."""
    if DEVICE == "cpu":
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    requests = json.loads(Path(requests_path).read_text())
    llm = LLM(
        model=policy,
        skip_tokenizer_init=True,
        dtype=DTYPE,
        enforce_eager=not compiled,
        max_model_len=CONFIG["max_position_embeddings"],
        max_num_seqs=TRIALS,
        block_size=32,
        kv_cache_memory_bytes=int(kv_gib * (1 << 30)) if DEVICE == "cuda" else None,
        enable_prefix_caching=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        seed=0,
    )

    def run(part: list[dict[str, Any]]) -> tuple[float, int]:
        asked = [
            SamplingParams(
                max_tokens=one["sampled"],
                temperature=1.0,
                seed=one["seed"],
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for one in part
        ]
        begun = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": one["prompt"]} for one in part], asked, use_tqdm=False)
        return time.perf_counter() - begun, sum(len(one.outputs[0].token_ids) for one in done)

    found: dict[str, Any] = {}
    run(requests[:TRIALS])  # kernels are compiled here
    for name, parts in (
        ("at_once", [sorted(requests, key=lambda one: one["turn"])]),
        ("by_turn", [[one for one in requests if one["turn"] == turn] for turn in range(TURNS)]),
    ):
        llm.reset_prefix_cache()
        runs = [run(part) for part in parts]
        seconds, tokens = sum(s for s, _ in runs), sum(t for _, t in runs)
        found |= {
            f"{name}_seconds": seconds,
            f"{name}_tokens_per_second": tokens / seconds,
            f"{name}_tokens": tokens,
        }
    print("OFFLINE " + json.dumps(found), flush=True)


def alone(options: argparse.Namespace, policy: Path, out: Path) -> dict[str, Any]:
    """`offline` in a process of its own, once the server is gone."""
    with open(out / "offline.log", "wb") as log:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.vllm_engine", "--offline", str(out / "requests.json")]
            + [
                "--policy",
                str(policy),
                "--kv-gib",
                f"{options.kv_gib}",
                *(["--eager"] if options.eager else []),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=options.alone_s,
            check=False,
            env={**os.environ, **({"TORCHDYNAMO_DISABLE": "1"} if options.eager else {})},
        )
        log.write(ran.stdout)
    lines = [line for line in ran.stdout.decode().splitlines() if line.startswith("OFFLINE ")]
    if not lines:
        raise RuntimeError(f"vLLM alone must tell its speed, got exit code {ran.returncode}: see offline.log")
    return json.loads(lines[-1].removeprefix("OFFLINE "))


def make_policy(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    state = state_of(0)
    save_weights(folder / "model.safetensors", state)
    return state


def main(options: argparse.Namespace) -> None:
    """All parts, one line each."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm") / f"bartleby-{os.getpid()}"
    shared.mkdir()
    lines: dict[str, dict[str, Any]] = {}

    def part(name: str, seconds: int, work: Callable[[], dict[str, Any]]) -> None:
        begun = time.perf_counter()
        try:
            with limit(seconds):
                lines[name] = work()
        except BaseException as error:  # noqa: BLE001 - told in its line; the machine is lent for minutes, so go on
            lines[name] = {"fault": " ".join(f"{type(error).__name__}: {error}".split())[:600]}
            traceback.print_exc()
        line = {"part": name, "part_s": time.perf_counter() - begun, **lines[name]}
        print(json.dumps(line), flush=True)
        with open(out / "vllm_engine.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    policy = shared / "policy"
    state = make_policy(policy)
    part("machine", 30, lambda: machine(state))
    settings = Settings(
        python=sys.executable,
        policy_dir=str(policy),
        socket_path=str(shared / "s"),
        log_path=str(out / "engine.jsonl"),
        device=DEVICE,
        dtype=DTYPE,
        max_context=CONFIG["max_position_embeddings"],
        max_sessions=TRIALS,
        kv_gib=options.kv_gib,
        compiled=not options.eager,
        start_s=options.start_s,
    )
    held: list[VllmEngine] = []

    def start() -> dict[str, Any]:
        begun = time.perf_counter()
        held.append(start_vllm_engine(settings))
        return {"start_s": time.perf_counter() - begun, **held[0].description}

    try:
        part("start", options.start_s + 30, start)
        if held:
            part("exactness", 120, lambda: exactness(held[0], state, policy))
            part("speed", 300, lambda: speed(held[0], out))
            part("updates", 150, lambda: updates(held[0], policy, shared))
            part("stats", 30, held[0].stats)
    finally:
        for engine in held:
            engine.close()
        (out / "engine.jsonl").unlink(missing_ok=True)  # hundreds of thousands of tokens
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    if "tokens_per_second" in lines.get("speed", {}):
        part("alone", options.alone_s + 10, lambda: alone(options, policy, out))
    table(lines)
    subprocess.run(["rm", "-rf", str(shared), str(out / "requests.json")], check=False)


def machine(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(0) if DEVICE == "cuda" else "none",
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "parameters": parameter_count(state),
    }


def table(lines: dict[str, dict[str, Any]]) -> None:
    """What there is to say, in a few rows."""
    x, u, s, a = (lines.get(name, {}) for name in ("exactness", "updates", "speed", "alone"))
    rows = [
        ("mean |gap| to transformers, bf16, T=1", x.get("mean_gap_transformers_at_1"), "0.015"),
        ("the same at T=0.7", x.get("mean_gap_transformers_at_0.7"), "0.015"),
        ("after an update in flight", u.get("mean_gap_transformers_after_reset"), "0.015"),
        ("requests dropped by three updates", u.get("dropped"), "0"),
        ("requests whose version changed inside", u.get("changed_inside"), "256"),
        ("pause of an update, s", u.get("pause_s"), ""),
        ("tokens/s through the front, 256 trials", s.get("tokens_per_second"), ""),
        ("tokens/s of vLLM alone, at once", a.get("at_once_tokens_per_second"), ""),
        ("tokens/s of vLLM alone, turn by turn", a.get("by_turn_tokens_per_second"), ""),
    ]
    best = max(
        (a[n] for n in ("at_once_tokens_per_second", "by_turn_tokens_per_second") if n in a), default=None
    )
    if best and s.get("tokens_per_second"):
        rows.append(("ours of the faster one", s["tokens_per_second"] / best, "0.9"))
    for name, value, target in rows:
        shown = "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
        print(f"{name:45} {shown:>12} {target:>8}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "out/vllm_engine"))
    parser.add_argument("--kv-gib", type=float, default=24.0 if DEVICE == "cuda" else 1.0)
    parser.add_argument("--start-s", type=int, default=240)
    parser.add_argument("--alone-s", type=int, default=240)
    parser.add_argument("--eager", action="store_true", help="no compiling, no graphs: a quicker start")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    told_options = parser.parse_args()
    if told_options.offline:
        offline(told_options.policy, not told_options.eager, told_options.kv_gib, told_options.offline)
    else:
        main(told_options)
