"""Who may be inside at the same time: requests, as far as their keys and values fit. No torch."""

from __future__ import annotations

import asyncio


class Room:
    """Lets requests in, in their order, while their keys and values fit, and none while it is closed."""

    def __init__(self, tokens: int, requests: int) -> None:
        self._tokens, self._requests = tokens, requests
        self.taken, self.inside = 0, 0
        self._open = True
        self._queue: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Requests outside."""
        return len(self._queue)

    async def enter(self, tokens: int) -> None:
        """Wait for so much room."""
        waits = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, waits))
        self._admit()
        try:
            await waits
        except asyncio.CancelledError:
            if waits.done() and not waits.cancelled():
                self.leave(tokens)
            else:
                self._queue = [entry for entry in self._queue if entry[1] is not waits]
            raise

    def leave(self, tokens: int) -> None:
        """Give it back."""
        self.taken -= tokens
        self.inside -= 1
        self._admit()

    def close(self) -> None:
        """Let nobody in."""
        self._open = False

    def open(self) -> None:
        """Let those in again who fit."""
        self._open = True
        self._admit()

    def _admit(self) -> None:
        while self._open and self._queue:
            tokens, waits = self._queue[0]
            fits = self.taken + tokens <= self._tokens and self.inside < self._requests
            if not fits and self.inside:
                return
            self._queue.pop(0)
            if waits.done():  # cancelled
                continue
            self.taken += tokens
            self.inside += 1
            waits.set_result(None)
