"""MCP over a byte stream: newline-delimited JSON-RPC, the server's end inside, the client's outside."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream
from mcp import Client
from mcp.client._transport import TransportStreams
from mcp.server import Server
from mcp.shared._context_streams import create_context_streams
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from system.tools.server import build_server  # here: inside a sandbox this project's modules cannot be read

MAX_LINE = 32 << 20
"""Longest message in bytes; a peer that sends more without a newline is cut off."""


def serve(fd: int, root: Path) -> None:
    """Serve the office tools over a world on a connected socket until the other end closes it."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, force=True)
    anyio.run(serve_server, build_server(root), socket.socket(fileno=fd))


async def serve_server(server: Server[Any], sock: socket.socket) -> None:
    """Serve any server on a connected socket until the other end closes it."""
    async with socket_client(sock) as (read, write):
        await server.run(read, write, server.create_initialization_options())


@asynccontextmanager
async def open_client(sock: socket.socket, *, timeout_s: float) -> AsyncIterator[Client]:
    """An MCP client over a sandbox's stream; a request fails after timeout_s, and at once if the server dies.

    It speaks the newest protocol of the SDK without asking: both ends are the same installation. What is
    raised in its block comes out as it was, not wrapped in the exception groups of the tasks behind it.

    Raises:
        MCPError: out of a request.
    """
    newest = MODERN_PROTOCOL_VERSIONS[-1]
    try:
        transport = socket_client(sock)
        async with Client(transport, read_timeout_seconds=timeout_s, cache=None, mode=newest) as client:
            yield client
    except ExceptionGroup as group:
        only = _only(group)
        raise only from only.__cause__


def _only(error: Exception) -> Exception:
    """The one exception inside a nest of groups, or the group that holds several."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def socket_client(sock: socket.socket) -> AsyncIterator[TransportStreams]:
    """Transport of either end over a connected stream socket, which it closes at the end."""
    incoming, read = create_context_streams[SessionMessage | Exception](0)
    write, outgoing = create_context_streams[SessionMessage](0)
    sock.setblocking(False)
    stream = await anyio.abc.UNIXSocketStream.from_socket(sock)
    async with stream, anyio.create_task_group() as group:
        group.start_soon(_receive, stream, incoming)
        group.start_soon(_send, stream, outgoing)
        try:
            yield read, write
        finally:
            group.cancel_scope.cancel()


async def _receive(stream: ByteStream, incoming) -> None:
    """Lines to messages; the end of the stream ends the session, which fails every waiting call."""
    buffer = bytearray()
    async with incoming:
        try:
            async for chunk in stream:
                buffer += chunk
                if b"\n" in chunk:
                    *lines, buffer = buffer.split(b"\n")
                    for line in lines:
                        await incoming.send(_parse(bytes(line)))
                if len(buffer) > MAX_LINE:
                    return
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


def _parse(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _send(stream: ByteStream, outgoing) -> None:
    async with outgoing:
        try:
            async for message in outgoing:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await stream.send(text.encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
