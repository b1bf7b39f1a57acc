"""core may be copied under any name: there it passes its own laws, and never reaches for the original."""

from __future__ import annotations

import os

from copied import copied, run

QUICK = (
    "not compile and not graph and not of_100 and not interval and not as_often_as_stated and not cut_text"
)
"""Without laws that take many seconds each: compilers, and counts over many trials. CI runs those too."""

MANY = "ten_thousand"
"""Runs of the schedule that take a minute, and are the same under any name."""


def test_a_copy_of_core_passes_its_laws_under_another_name(tmp_path):
    copied("vendored_rl", tmp_path, examples=2)
    quick = ["-k", f"{QUICK} and not {MANY}", "--ignore", "tests/property/test_dtype_device.py"]
    done = run(tmp_path, "tests/property", *(["-k", f"not {MANY}"] if os.environ.get("CI") else quick))
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


def test_the_original_is_out_of_reach_of_a_copy(tmp_path):
    copied("vendored_rl", tmp_path, examples=1)
    law = tmp_path / "tests" / "property" / "test_reach.py"
    law.write_text("def test_reach():\n    import core.loss\n", encoding="utf-8")
    done = run(tmp_path, str(law))
    assert done.returncode == 1 and "must not import the original" in done.stdout
