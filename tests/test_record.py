"""What a run leaves behind can be read at any moment, says what the numbers say, and stands alone."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fixture_run import ARMS, write_run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from core.estimate import compare
from system.record.finding import finding, sentences
from system.record.metrics import JsonLines, commit_hash, read_jsonl, write_json
from system.record.progress import Progress, sparkline
from system.record.report import _mix, viewer_data, write_report
from system.record.table import clock, print_summary

_NUMBER = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
_RECORD = st.dictionaries(st.text(max_size=5), _NUMBER | st.text(max_size=8) | st.none(), max_size=4)


@given(records=st.lists(_RECORD, max_size=6), torn=st.binary(max_size=30))
def test_json_lines_come_back_whole_after_a_torn_tail_and_a_reopening(tmp_path_factory, records, torn):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    half = len(records) // 2
    with JsonLines(path) as lines:
        for record in records[:half]:
            lines.write(record)
    with open(path, "ab") as file:
        file.write(torn.replace(b"\n", b""))
    assert list(read_jsonl(path)) == records[:half]
    with JsonLines(path) as lines:
        for record in records[half:]:
            lines.write(record)
    assert list(read_jsonl(path)) == records


def test_json_lines_are_on_disk_before_write_returns(tmp_path):
    lines = JsonLines(tmp_path / "deep" / "metrics.jsonl")
    lines.write({"reward": math.nan, "rows": [{"x": math.inf}]})
    assert list(read_jsonl(tmp_path / "deep" / "metrics.jsonl")) == [{"reward": None, "rows": [{"x": None}]}]
    lines.close()
    lines.close()
    with pytest.raises(ValueError, match="must be open"):
        lines.write({})


def test_json_lines_name_the_line_that_is_no_object(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n[1]\n{"a":2}\n')
    with pytest.raises(ValueError, match="line 2 must be a JSON object"):
        list(read_jsonl(path))


def test_json_lines_survive_a_killed_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import os, signal, sys; from system.record.metrics import JsonLines\n"
        "lines = JsonLines(sys.argv[1])\n"
        "for step in range(50): lines.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], cwd=_ROOT, check=False)
    assert [line["step"] for line in read_jsonl(path)] == list(range(50))


def test_a_whole_json_value_replaces_the_old_one(tmp_path):
    write_json(tmp_path / "config.json", {"a": 1})
    write_json(tmp_path / "config.json", {"a": tmp_path, "b": math.nan})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": str(tmp_path), "b": None}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_outside_a_checkout_has_no_commit(tmp_path):
    assert commit_hash(tmp_path) == ""


def _comparison(a: str, b: str, difference: float, verdict: str) -> dict[str, Any]:
    low, high = difference - 0.05, difference + 0.05
    return {
        "a": a,
        "b": b,
        "difference": difference,
        "low": low,
        "high": high,
        "verdict": verdict,
        "seeds_needed": 14,
    }


def test_the_finding_claims_a_winner_only_where_a_comparison_does():
    ties = [
        _comparison("token_mean", "prompt_mean", -0.01, "tie"),
        _comparison("a", "prompt_mean", 0.02, "tie"),
    ]
    assert finding({"comparisons": ties}).startswith("No rule wins: all 3 rules tie")
    assert "0.07" in finding({"comparisons": ties})
    won = [*ties, _comparison("token_mean", "a", 0.2, "b better")]
    assert finding({"comparisons": won}) == "On held-out tasks a beats token mean by 0.20 (2 ties)"
    assert "stopped" in finding(None) and "stopped" in finding({"comparisons": []})


def test_a_sentence_is_told_from_the_winner():
    (sentence,) = sentences({"comparisons": [_comparison("prompt_mean", "token_mean", -0.2, "a better")]})
    assert sentence == "prompt mean beats token mean: +0.200 pass@1, 95 % interval +0.150 to +0.250."
    (sentence,) = sentences({"comparisons": [_comparison("token_mean", "prompt_mean", -0.02, "tie")]})
    assert sentence.startswith(
        "prompt mean against token mean, a tie: −0.020 pass@1, 95 % interval −0.070 to +0.030;"
    )
    assert "14 seeds" in sentence


def test_an_interval_without_end_is_null_in_the_files_and_still_told():
    told = {**_comparison("a", "b", 0.5, "tie"), "low": None, "high": None, "confidence": 0.9}
    assert "tie" in finding({"comparisons": [told]}) and "inf" in finding({"comparisons": [told]})
    assert "90 % interval −inf to +inf" in sentences({"comparisons": [told]})[0]


def test_the_words_agree_with_the_comparison_that_core_makes():
    better, worse = [[1.0, 1.0, 0.9], [1.0, 0.9, 1.0]], [[0.1, 0.0, 0.0], [0.0, 0.1, 0.1]]
    for a, b in ((better, worse), (worse, better)):
        names = {"a": "good" if a is better else "bad", "b": "good" if b is better else "bad"}
        summary = {"comparisons": [names | dataclasses.asdict(compare(a, b, confidence=0.95))]}
        assert sentences(summary)[0].startswith("good beats bad: +0.9")
        assert finding(summary).startswith("On held-out tasks good beats bad by 0.9")


def test_the_sparkline_keeps_one_bar_a_value():
    assert sparkline([0.0, 0.5, None, 1.0, 2.0, -1.0]) == "▁▅·██▁"
    assert clock(7265) == "2:01:05" and clock(59.6) == "1:00"


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_prints_one_plain_line_a_step_where_there_is_no_terminal():
    out, time = io.StringIO(), _Clock()
    with Progress({"prompt_mean": 2}, console=Console(file=out, width=60), clock=time) as progress:
        time.now = 30.0
        progress.trial_done(32)
        line = {"arm": "prompt_mean", "seed": 0, "step": 1, "reward": 0.5, "staleness": {"0": 1, "2": 1}}
        progress.record(line)
        progress.record({"arm": "prompt_mean", "seed": 0, "eval": True, "passed": 0.25})
    first, second = out.getvalue().splitlines()
    assert "step 1 (1/2) reward 0.50" in first and "staleness 1.0" in first
    assert "64 trials/min" in first and "0:30 left" in first
    assert second == "prompt mean seed 0 held-out pass@1 0.250"


def test_progress_draws_in_place_on_a_terminal_and_leaves_the_last_state():
    out, time = io.StringIO(), _Clock()
    console = Console(file=out, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with Progress({"prompt_mean": 2, "token_mean": 2}, console=console, clock=time) as progress:
        for step in (1, 2):
            time.now += 1
            progress.record(
                {"arm": "prompt_mean", "seed": 0, "step": step, "reward": 0.5, "trainer_idle": 0.4}
            )
        progress.phase("token_mean", "evaluating")
        progress.note("one system error")
    drawn = out.getvalue()
    assert "2/2" in drawn and "▅▅" in drawn and "evaluating" in drawn and "one system error" in drawn
    assert "…" not in drawn
    with pytest.raises(ValueError, match="arm must be one of"):
        progress.record({"arm": "no_such", "seed": 0, "step": 1})


@given(
    counts=st.dictionaries(st.sampled_from(["solved", "failed", "truncated"]), st.integers(1, 60)),
    n=st.integers(0, 50),
)
def test_the_viewer_sample_is_as_even_as_the_counts_allow(counts, n):
    kinds = {
        kind: list(range(1000 * place, 1000 * place + many))
        for place, (kind, many) in enumerate(counts.items())
    }
    chosen = _mix(kinds, n)
    taken = {kind: sum(index in indices for index in chosen) for kind, indices in kinds.items()}
    assert len(set(chosen)) == len(chosen) == min(n, sum(counts.values()))
    assert all(taken[a] >= taken[b] - 1 or taken[a] == counts[a] for a in counts for b in counts)


def test_the_viewer_refuses_a_decode_that_loses_tokens():
    row = {
        "token_ids": [1, 2],
        "loss_mask": [True, True],
        "rollout_logprob": [0, 0],
        "policy_version": [0, 0],
    }
    with pytest.raises(ValueError, match="one piece a token, got 1 for 2"):
        viewer_data([{"trial_id": "t", "rows": [row]}], {}, lambda token_ids: ["x"])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: list[str] = []
        self._script = False

    def handle_starttag(self, tag, attrs):
        self._script = tag == "script"
        self.links += [value for key, value in attrs if key in ("src", "href") and value]

    def handle_data(self, data):
        if self._script:
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self._script = False


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    return folder, write_run(folder, winner="prompt_mean")


def test_the_report_stands_alone_and_holds_the_sample(run):
    folder, decode = run
    text = write_report(folder, decode=decode, sample=10).read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert all(link.startswith("data:") for link in page.links)
    assert not re.search(r"url\(|@import|//[a-z]+\.", text)
    assert "On held-out tasks prompt mean beats" in text and "interrupted" not in text
    data = json.loads(page.scripts[0])
    assert {arm: sum(t["arm"] == arm for t in data["trajectories"]) for arm in ARMS} == dict.fromkeys(
        ARMS, 10
    )
    assert {t["kind"] for t in data["trajectories"]} == {"solved", "failed", "truncated", "system_error"}
    written = {line["trial_id"]: line for line in read_jsonl(folder / "trajectories.jsonl")}
    for trajectory in data["trajectories"]:
        (source,), (row,) = written[trajectory["id"]]["rows"], trajectory["rows"]
        assert [data["pieces"][index] for index in row["t"]] == decode(source["token_ids"])
        assert [version for version, many in row["v"] for _ in range(many)] == source["policy_version"]
        assert [bool(kept) for kept, many in row["m"] for _ in range(many)] == source["loss_mask"]


def test_the_report_of_an_interrupted_run_says_so(tmp_path):
    decode = write_run(tmp_path, finished=False, seeds=1, steps=2)
    with open(tmp_path / "trajectories.jsonl", "ab") as file:
        file.write(b'{"trial_id": "torn')
    text = write_report(tmp_path, decode=decode, sample=2).read_text(encoding="utf-8")
    assert "This run was interrupted" in text and "No held-out comparison yet" in text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_run_that_just_began_can_be_made(tmp_path):
    write_json(tmp_path / "config.json", {"arms": ["prompt_mean"]})
    assert "interrupted" in write_report(tmp_path, decode=lambda token_ids: []).read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="config.json"):
        write_report(tmp_path / "nowhere", decode=lambda token_ids: [])


def test_the_final_table_fits_eighty_columns_and_shows_every_arm(run):
    folder, _ = run
    out = io.StringIO()
    print_summary(json.loads((folder / "summary.json").read_text()), console=Console(file=out, width=80))
    assert "…" not in out.getvalue() and max(map(len, out.getvalue().splitlines())) <= 80
    assert all(arm.replace("_", " ") in out.getvalue() for arm in (*ARMS, "warm start"))


def test_record_needs_no_torch():
    script = (
        "import sys, system.record.report, system.record.progress, system.record.metrics\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=_ROOT, check=False).returncode == 0


_ROOT = Path(__file__).parent.parent
