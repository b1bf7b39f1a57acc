"""What the tests of this folder share: where vLLM is, and the settings of an engine of the repository's policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from system.engine.vllm import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
CLERK = ROOT / "policies" / "clerk"
PYTHON = os.environ.get("VLLM_PYTHON", "")
CONTEXT = 1200
STALL_S = 60.0


def settings(folder: Path, **changes: Any) -> Settings:
    """Of an engine of the repository's policy whose files lie in a folder."""
    told: dict[str, Any] = {
        "python": PYTHON,
        "policy_dir": str(CLERK),
        "socket_path": str(folder / "s"),
        "log_path": str(folder / "log.jsonl"),
        "device": "cpu",
        "dtype": "float32",
        "max_context": CONTEXT,
        "max_sessions": 8,
        "kv_gib": 1.0,
        "stall_s": STALL_S,
        "start_s": 1200.0,
        **changes,
    }
    return Settings(**told)
