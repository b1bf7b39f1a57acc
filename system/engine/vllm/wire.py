"""HTTP over a unix socket, as much of it as a server of our own needs: JSON in and out, connections kept. No torch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

LARGEST_HEADER = 1 << 16


class Refused(Exception):
    """The server answered, with another status than 200; the message is one line of what it said."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Wire:
    """A client of one server; any number of calls at a time, each on a connection of its own that is used again.

    Args:
        path: of the unix socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, method: str, target: str, body: Any = None, *, timeout_s: float | None) -> Any:
        """What the server answers, parsed where it is JSON.

        Raises:
            Refused: it answers with another status than 200.
            OSError: it does not answer, in time where a time is given (TimeoutError).
        """
        said = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(said)}\r\n\r\n"
        )
        async with asyncio.timeout(timeout_s):
            status, kind, answer = await self._exchanged(head.encode() + said)
        told = json.loads(answer) if kind.startswith("application/json") and answer else answer.decode()
        if status != 200:
            raise Refused(status, _fault_of(told))
        return told

    def close(self) -> None:
        """Let go of the connections that are not in use."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _exchanged(self, request: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=LARGEST_HEADER)
        try:
            writer.write(request)
            answer, keep = await _answer(reader)
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise ConnectionError("server closed the connection before it had answered") from error
        except BaseException:
            writer.close()
            raise
        if keep:
            self._idle.append((reader, writer))
        else:
            writer.close()
        return answer


async def _answer(reader: asyncio.StreamReader) -> tuple[tuple[int, str, bytes], bool]:
    """An answer, and whether another may follow on this connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ", 2)[1])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join([chunk async for chunk in _chunks(reader)])
    else:
        body = await reader.readexactly(int(fields.get("content-length", "0")))
    keep = fields.get("connection", "").lower() != "close"
    return (status, fields.get("content-type", ""), body), keep


async def _chunks(reader: asyncio.StreamReader):
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")


def _fault_of(told: Any) -> str:
    """One line of an answer that is a refusal."""
    while isinstance(told, dict):
        told = next((told[name] for name in ("error", "message", "detail") if name in told), str(told))
    return " ".join(str(told).split())[:2000]
