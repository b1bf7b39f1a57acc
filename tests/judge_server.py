"""A judge's endpoint on loopback that answers from a list, and remembers who asked what when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """One reply: `Scripted(status=429, headers={"Retry-After": "1"})`.

    Args:
        delay_s: before the status line.
        drip_s: between any two bytes of the body; 0 sends it at once.
        slow_head_s: between any two bytes of the head.
        close: end the connection without a reply.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    slow_head_s: float = 0.0
    close: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request as it came: when, from which port, with which key, and its body."""

    at_s: float
    port: int
    path: str
    key: str
    body: dict[str, Any]


def said(content: Any, *, finish: str = "stop", **more: Any) -> Scripted:
    """A chat completion with a text, or with a value as JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    reply = {
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
    return Scripted(body=json.dumps(reply).encode(), **more)


def refused(status: int, code: str = "", message: str = "", **more: Any) -> Scripted:
    """An error in the words of the protocol."""
    return Scripted(
        status=status, body=json.dumps({"error": {"code": code, "message": message}}).encode(), **more
    )


Script = Iterable[Scripted] | Callable[[Asked], Scripted]


class JudgeServer:
    """`with JudgeServer([refused(429), said({"met": True})]) as server: ...`; the last reply is repeated.

    A function instead of a list decides by the request: two callers at once get what is theirs.
    """

    def __init__(self, script: Script) -> None:
        self.asked: list[Asked] = []
        self._decide = script if callable(script) else None
        self._replies = [] if callable(script) else list(script)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._reply(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint(self) -> str:
        """What a client takes as its endpoint."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def keys(self) -> list[str]:
        """The keys in the order in which they came."""
        return [asked.key for asked in self.asked]

    @property
    def waits(self) -> list[float]:
        """Seconds between two requests."""
        return [b.at_s - a.at_s for a, b in zip(self.asked, self.asked[1:])]

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _reply(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", "0"))
        key = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        body = json.loads(handler.rfile.read(length))
        port = handler.client_address[1]
        asked = Asked(at_s=time.monotonic(), port=port, path=handler.path, key=key, body=body)
        with self._lock:
            self.asked.append(asked)
            if self._decide is None:
                reply = self._replies[min(len(self.asked), len(self._replies)) - 1]
        if self._decide is not None:
            reply = self._decide(asked)
        try:
            self._send(handler, reply)
        except OSError:
            pass  # the client has hung up, as it should
        handler.close_connection = True

    def _send(self, handler: BaseHTTPRequestHandler, reply: Scripted) -> None:
        self._stopped.wait(reply.delay_s)
        if reply.close:
            return
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(reply.body)),
            **reply.headers,
        }
        head = f"HTTP/1.1 {reply.status} Scripted\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        self._slowly(handler, f"{head}\r\n".encode(), reply.slow_head_s)
        self._slowly(handler, reply.body, reply.drip_s)

    def _slowly(self, handler: BaseHTTPRequestHandler, data: bytes, pause_s: float) -> None:
        pieces = [data[i : i + 1] for i in range(len(data))] if pause_s else [data]
        for piece in pieces:
            handler.wfile.write(piece)
            handler.wfile.flush()
            if pause_s and self._stopped.wait(pause_s):
                return
