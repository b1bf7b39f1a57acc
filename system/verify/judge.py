"""An LLM judge behind an OpenAI-compatible endpoint: several keys, one budget of calls, answers that fit a schema.

The keys are read from the environment of the process that makes the client and stay in it: no question, answer,
error or result holds one. A judge that cannot be had raises; it never means a reward of 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio

from core.retry import KeyState, Progress, Reply, RetryRule, after_reply, next_step

from .fault import VerifyError
from .reply import Unparsable, completion_text, fitting_value

FORMS = ("json_schema", "json_object", "prose")
"""How an answer in JSON is asked for, from the strictest; every form is told the schema in words too."""

_CHUNK = 1 << 16
_LARGEST_ERROR = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Which judge, and how patient: `JudgeSettings(endpoint="https://host/v1", model="m", key_variables=("K",))`."""

    endpoint: str
    "What comes before /chat/completions."
    model: str
    "Its name there."
    key_variables: tuple[str, ...] = ()
    "Environment variables that hold one key each; none for a server that asks for none."
    timeout_s: float = 180.0
    "Deadline of a question, over all calls and waits."
    attempt_s: float = 60.0
    "Deadline of one call."
    attempts: int = 8
    "Most calls for one question."
    base_s: float = 1.0
    "First back-off; it doubles."
    ceiling_s: float = 30.0
    "Largest back-off of our own; what the server asks for is kept whatever it is."
    request_characters: int = 120_000
    "Size of a question, evidence counted in bytes of UTF-8; what is beyond is cut, and the judge is told."
    reply_bytes: int = 1_000_000
    "Size of a reply; a longer one is not read to its end."
    reply_tokens: int = 4_096
    "Tokens that the judge may write."
    temperature: float = 0.0
    "Of the judge's sampling."
    extra: Mapping[str, Any] = field(default_factory=dict)
    "Further fields of the request, as the server names them; None takes one away."

    def __post_init__(self) -> None:
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise ValueError(f"endpoint must be an http or https address, got {self.endpoint!r}")
        if urlsplit(self.endpoint).username is not None:
            raise ValueError("endpoint must hold no user name nor key, got one")
        for name in ("timeout_s", "attempt_s", "request_characters", "reply_bytes", "reply_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        _ = self.rule

    @property
    def rule(self) -> RetryRule:
        """The budget of a question."""
        return RetryRule(
            attempts=self.attempts, base_s=self.base_s, ceiling_s=self.ceiling_s, forms=len(FORMS)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a judge is asked: `Question(name="rubric", instructions="Say ...", evidence="...", schema={...})`."""

    name: str
    "Of the schema; letters, digits, _ and -."
    instructions: str
    "Ours: what to do, and how to answer."
    evidence: str
    "What is to be judged, fenced by the caller."
    schema: dict[str, Any]
    "JSON schema of the answer, in the strict subset: an object, all properties required, no others."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a judge said: `Answer(value={"met": True}, calls=2, seconds=1.9, tokens={"prompt_tokens": 812})`."""

    value: Any
    calls: int
    seconds: float
    tokens: dict[str, int]


class Judge(Protocol):
    """Answers a question with a value that fits its schema."""

    @property
    def request_characters(self) -> int:
        """Size of a question."""
        ...

    def ask(self, question: Question, /) -> Answer:
        """Blocks until there is an answer. Raises VerifyError("judge_...")."""
        ...


def read_keys(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys behind the names of variables.

    Raises:
        ValueError: a variable is missing or empty, or holds what no header can; the message names it, not its value.
    """
    keys = tuple(environment.get(name, "").strip() for name in names)
    for name, key in zip(names, keys, strict=True):
        if not key or not key.isascii() or not key.isprintable():
            state = "an unprintable one" if key else "none"
            raise ValueError(f"environment must hold a judge's key as {name}, got {state}")
    return keys


class JudgeClient:
    """A judge over HTTP; threads may share it, and with it what is known of each key.

    `ask` runs an event loop of its own: call it where none runs, or await `answer`.
    """

    def __init__(self, settings: JudgeSettings, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self.settings = settings
        self._keys = read_keys(settings.key_variables, given) or ("",)
        self._states = (KeyState(),) * len(self._keys)
        self._form = 0
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None

    @property
    def request_characters(self) -> int:
        """Size of a question."""
        return self.settings.request_characters

    def ask(self, question: Question) -> Answer:
        """Blocks until there is an answer. Raises VerifyError("judge_...")."""
        return anyio.run(self.answer, question)

    async def answer(self, question: Question) -> Answer:
        """The same, in an event loop."""
        import httpx2

        size = len(question.instructions) + len(question.evidence)
        if size > self.settings.request_characters:
            limit = self.settings.request_characters
            raise VerifyError("judge_oversized", f"a question has {limit} characters at most, got {size}")
        # Questions differ by the nonces of their fences, so callers that ask the same still wait apart.
        seed = int.from_bytes(hashlib.sha256(question.evidence.encode(errors="replace")).digest()[:8])
        begun = time.monotonic()
        deadline, progress, detail = begun + self.settings.timeout_s, Progress(form=self._form), ""
        # A kept connection may be closed by the server just as the next attempt is written to it.
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=None, verify=self._trusted(), limits=limits) as client:
            while True:
                with self._lock:
                    step = next_step(
                        progress,
                        self._states,
                        rule=self.settings.rule,
                        now_s=time.monotonic(),
                        deadline_s=deadline,
                        seed=seed,
                    )
                if step.kind == "stop":
                    said = f" ({detail})" if detail else ""
                    calls, seconds = progress.attempts, time.monotonic() - begun
                    raise VerifyError(
                        f"judge_{step.cause}", f"no answer after {calls} calls in {seconds:.1f} s{said}"
                    )
                if step.kind == "wait":
                    await anyio.sleep(step.until_s - time.monotonic())
                    continue
                form = progress.form
                reply, outcome = await self._call(client, question, step.key, form, deadline)
                with self._lock:
                    progress, self._states = after_reply(
                        progress,
                        self._states,
                        reply,
                        key=step.key,
                        rule=self.settings.rule,
                        now_s=time.monotonic(),
                        seed=seed,
                    )
                    if progress.fault == "refused" and not progress.final:
                        self._form = max(self._form, progress.form)
                if isinstance(outcome, str):
                    detail = outcome
                    continue
                value, tokens = outcome
                seconds = time.monotonic() - begun
                return Answer(value=value, calls=progress.attempts, seconds=seconds, tokens=tokens)

    def _trusted(self) -> ssl.SSLContext:
        """Whom TLS trusts, read once and not at every question."""
        import httpx2

        self._context = self._context or httpx2.create_ssl_context()
        return self._context

    async def _call(
        self, client: Any, question: Question, key: int, form: int, deadline: float
    ) -> tuple[Reply, tuple[Any, dict[str, int]] | str]:
        """One call: what core.retry must know, and the answer or one line about its lack."""
        import httpx2

        status, headers, body = None, {}, bytearray()
        try:
            with anyio.fail_after(min(self.settings.attempt_s, max(0.0, deadline - time.monotonic()))):
                async with client.stream(
                    "POST",
                    self.settings.endpoint.rstrip("/") + "/chat/completions",
                    headers=self._headers(key),
                    content=self._body(question, form),
                ) as response:
                    status, headers = response.status_code, response.headers
                    limit = self.settings.reply_bytes if response.is_success else _LARGEST_ERROR
                    async for chunk in response.aiter_raw(_CHUNK):
                        body += chunk
                        if len(body) > limit:
                            break
        except TimeoutError:
            return Reply(None, "timeout", "", None), "a call took too long"
        except httpx2.TransportError as error:
            return Reply(None, "connection", "", None), self._redacted(f"{type(error).__name__}: {error}")
        retry_after_s = asked_wait(headers, datetime.now(UTC))
        if not 200 <= status < 300:
            code, message = _error_of(bytes(body))
            return Reply(status, "", code, retry_after_s), self._redacted(
                f"status {status} {message}".strip()
            )
        if len(body) > self.settings.reply_bytes:
            return Reply(
                status, "oversized", "", None
            ), f"a reply of more than {self.settings.reply_bytes} bytes"
        try:
            text, tokens = completion_text(bytes(body))
            return Reply(status, "", "", None), (fitting_value(text, question.schema), tokens)
        except Unparsable as reason:
            return Reply(status, reason.fault, "", None), self._redacted(str(reason))

    def _headers(self, key: int) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        return headers | ({"Authorization": f"Bearer {self._keys[key]}"} if self._keys[key] else {})

    def _body(self, question: Question, form: int) -> bytes:
        schema = json.dumps(question.schema)
        told = f"{question.instructions}\n\nAnswer with one JSON object that fits this schema, and nothing else:\n"
        strict = {"name": question.name, "strict": True, "schema": question.schema}
        wanted = [
            {"response_format": {"type": "json_schema", "json_schema": strict}},
            {"response_format": {"type": "json_object"}},
            {},
        ]
        request = {
            "model": self.settings.model,
            "messages": [
                {"role": "system", "content": told + schema},
                {"role": "user", "content": question.evidence},
            ],
            "max_tokens": self.settings.reply_tokens,
            "temperature": self.settings.temperature,
            **wanted[form],
            **self.settings.extra,
        }
        return json.dumps({name: value for name, value in request.items() if value is not None}).encode()

    def _redacted(self, text: str) -> str:
        """One short line without any key: servers quote what they were sent."""
        for number, key in enumerate(self._keys, start=1):
            text = text.replace(key, f"<key {number}>") if key else text
        return " ".join(text.split())[:200]


def asked_wait(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds that a reply asks to wait: Retry-After-Ms, else Retry-After in seconds or as a date; None for none."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < math.inf:
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, TypeError, IndexError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())


def _error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an error reply, as far as it has them."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""
