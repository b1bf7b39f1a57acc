"""Work that a fork of this process does for it: what the fork reads is never in this process's memory."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn


class ChildDied(Exception):
    """The fork ended without a result; the text is what it raised, if it raised something."""


def in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` gives, as JSON brings it, computed in a fork that is gone afterwards.

    Raises:
        ChildDied: there is no result.
    """
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        tell(work, into)
    os.close(into)
    try:
        with open(out, "rb") as pipe:
            said = pipe.read()
    finally:  # also when an alarm breaks into the reading
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    result = json.loads(said) if said else {"fault": f"ended with {os.waitstatus_to_exitcode(status)}"}
    if "fault" in result:
        raise ChildDied(result["fault"])
    return result["value"]


def tell(work: Callable[[], Any], into: int, *, longest: int = 2000) -> NoReturn:
    """The end of a fork: writes {"value"} as JSON, or {"fault"}, what was raised, in one line of so many characters."""
    try:
        try:
            result = {"value": work()}
        except Exception as error:  # noqa: BLE001 - the last frame of a fork: it goes to the parent as a line
            result = {"fault": " ".join(f"{type(error).__name__}: {error}".split())[:longest]}
        said = json.dumps(result).encode()
        while said:
            said = said[os.write(into, said) :]
    finally:
        os._exit(0)
