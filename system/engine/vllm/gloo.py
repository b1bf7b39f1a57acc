"""A broadcast between a trainer and the workers of a server where there is no GPU. Needs torch, runs on both sides."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 << 20
"""Of one broadcast; both sides reckon with it."""

MEETING_S = 120.0


def group(address: str, port: int, *, rank: int, world_size: int) -> dist.ProcessGroupGloo:
    """Meet the others; the first of them listens."""
    timeout = timedelta(seconds=MEETING_S)
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, timeout)


def broadcast(members: Any, flat: torch.Tensor) -> None:
    """Bytes from the first of a group to all others, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    members.broadcast([flat], options).wait()
