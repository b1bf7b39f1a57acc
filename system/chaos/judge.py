"""A judge at the wire of the OpenAI protocol that can be made to stall: a criterion is met where there is an answer."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NO_ANSWER = "(none)"
CRITERION = {"id": "answered", "criterion": "Gives a final answer."}
"""What a task's rubric asks of this judge."""


def is_met(answer: str) -> bool:
    """What this judge says of a final answer."""
    return NO_ANSWER not in (answer or NO_ANSWER)


class StallingJudge:
    """`with StallingJudge() as judge: ... judge.endpoint ... judge.stall(9.0)`."""

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self._until, self._stopped, self._lock = 0.0, threading.Event(), threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                judge._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1})

    @property
    def endpoint(self) -> str:
        """What comes before /chat/completions."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def stall(self, seconds: float) -> None:
        """Answers nobody for so long; who asked meanwhile gets an answer then, if still there."""
        self._until = time.monotonic() + seconds

    def __enter__(self) -> StallingJudge:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", "0"))))
        with self._lock:
            self.asked += 1
        while (left := self._until - time.monotonic()) > 0 and not self._stopped.is_set():
            self._stopped.wait(left)
        text = " ".join(message["content"] for message in body["messages"] if message["role"] == "user")
        names = body["response_format"]["json_schema"]["schema"]["properties"]
        told = {name: {"rationale": "as it says", "met": NO_ANSWER not in text} for name in names}
        message = {"role": "assistant", "content": json.dumps(told)}
        reply = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}], "usage": {}}
        self._send(handler, json.dumps(reply).encode())

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        try:
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:  # the one who asked has hung up, as it should
            return
        with self._lock:
            self.answered += 1
        handler.close_connection = True
