"""Why did trials fail? Sorts those of a run or an audit by likely cause, each with the line that speaks for it.

python experiments/triage.py out/audit_environment/<time>
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from command import command_line, judge_client

from core.triage import clues_of
from system.record.metrics import read_jsonl, write_json
from system.record.opinion import spread_over_causes, with_opinions
from system.record.triage import SIGNS, is_failure, page, print_triage, sorted_out


@dataclass(frozen=True, kw_only=True)
class Config:
    run: tyro.conf.Positional[Path]
    """Folder of a run or an audit, with trajectories.jsonl."""
    out: Path | None = None
    """Folder of triage.json and triage.md; by default the same."""
    repeats: int = 3
    """The same call so often is a loop."""
    slow_share: float = 0.5
    """Share of the agent's time, in calls or in the engine, that explains a clock that ran out."""
    flood_share: float = 0.5
    """Share of all text, in one result, that explains a full context."""
    judge_endpoint: str = ""
    """OpenAI-compatible address of a judge for a second opinion; what comes before /chat/completions."""
    judge_model: str = ""
    """Its model."""
    judge_keys: tuple[str, ...] = ()
    """Environment variables that hold its keys."""
    judge_most: int = 50
    """Failures to ask about, taken from all causes in turn."""
    judge_side_by_side: int = 8
    """Questions at once."""

    def __post_init__(self) -> None:
        for name, least in {"repeats": 2, "judge_most": 1, "judge_side_by_side": 1}.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("slow_share", "flood_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie above 0 and not above 1, got {getattr(self, name)}")


def main(config: Config) -> dict[str, Any]:
    """Sorts the failures, writes and prints the result."""
    path = config.run / "trajectories.jsonl"
    if not path.is_file():
        raise ValueError(f"run must be a folder with trajectories.jsonl, got {config.run}")
    out = config.out or config.run
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, got the file {out}")
    judge = judge_client(config.judge_endpoint, config.judge_model, config.judge_keys)
    rules = partial(
        clues_of,
        signs=SIGNS,
        repeats=config.repeats,
        slow_share=config.slow_share,
        flood_share=config.flood_share,
    )
    told = sorted_out(read_jsonl(path), rules)
    if not told["trials"]:
        raise ValueError(f"run must hold a trial that ended, got none in {path}")
    if judge is not None:
        wanted = set(spread_over_causes(told["failures"], most=config.judge_most))
        lines = {
            line["trial_id"]: line
            for line in read_jsonl(path)
            if line["trial_id"] in wanted and is_failure(line)
        }
        told = with_opinions(told, lines, judge, side_by_side=config.judge_side_by_side)
    write_json(out / "triage.json", told)
    (out / "triage.md").write_text(page(told, folder=str(config.run)), encoding="utf-8")
    print_triage(told)
    print(f"report {out / 'triage.md'}")
    return told


if __name__ == "__main__":
    command_line("triage", main, Config)
