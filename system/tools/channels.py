"""Chat and calendar of the set `full`: read with times, written to."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from icalendar import Calendar, Event

from system.tools.arguments import NO_STRINGS
from system.tools.calendar import CALENDAR
from system.tools.chat import FOLDER, channel_file
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import NO_MATCH, matches, one_line
from system.tools.saving import save_bytes

_END = b"END:VCALENDAR"


def list_channels(root: Path) -> str:
    """List the chat channels with the number of their messages."""
    files = sorted((root / FOLDER).glob("*.json"))
    return "\n".join(f"{file.stem}: {_size(file)}" for file in files) or "no channels"


def read_channel(
    root: Path, channel: str, find: Annotated[str, "keep messages that contain this text"] = ""
) -> str:
    """Read a chat channel, a message a line with its time and its author."""
    lines = [_message_line(message) for message in _messages(channel_file(root, channel))]
    return "\n".join(line for line in lines if matches(find, line)) or (NO_MATCH if lines else "no messages")


def post_message(root: Path, channel: str, text: str, user: Annotated[str, "who posts it"] = "me") -> str:
    """Post a message to a chat channel."""
    file = channel_file(root, channel)
    if not text.strip():
        raise ValueError("text must not be empty")
    content = json.loads(file.read_text(encoding="utf-8"))
    messages = content["messages"] if isinstance(content, dict) else content
    last = messages[-1] if messages else {}
    message = {"user": user, "text": text}
    if isinstance(last, dict) and "time" in last:
        message = {"time": _minute_after(str(last["time"]))} | message
    messages.append(message)
    save_bytes(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return f"posted to {file.stem}, now {len(messages)} messages: {one_line(text)[:200]}"


def list_events(
    root: Path,
    find: Annotated[str, "keep events that contain this text"] = "",
    after: Annotated[str, "a date like 2026-03-02"] = "",
    before: Annotated[str, "a date like 2026-03-02"] = "",
) -> str:
    """List calendar events by start: start - end summary, place, attendees."""
    first, last = (
        _moment(name, text) if text else None for name, text in (("after", after), ("before", before))
    )
    calendar = Calendar.from_ical(existing_file(root, CALENDAR).read_bytes())
    events = sorted((_start(event), _event_line(event)) for event in calendar.walk("VEVENT"))
    lines = [
        line
        for start, line in events
        if matches(find, line)
        and (first is None or f"{start} 00:00" >= f"{first:%Y-%m-%d %H:%M}")
        and (last is None or f"{start} 00:00" < f"{last:%Y-%m-%d %H:%M}")
    ]
    return "\n".join(lines) or NO_MATCH


def create_event(
    root: Path,
    summary: str,
    start: Annotated[str, "like 2026-03-02 09:00, or 2026-03-02 for the whole day"],
    end: Annotated[str, "the same; an hour or a day after the start if left out"] = "",
    location: str = "",
    description: str = "",
    attendees: Annotated[list[str], "mail addresses"] = NO_STRINGS,
) -> str:
    """Add an event to the calendar."""
    if not summary.strip():
        raise ValueError("summary must not be empty")
    begins = _moment("start", start)
    whole_day = ":" not in start
    ends = _moment("end", end) if end else begins + (timedelta(days=1) if whole_day else timedelta(hours=1))
    if ends <= begins:
        raise ValueError(f"end must be after start, got {end}")
    file = existing_file(root, CALENDAR)
    data = file.read_bytes()
    if _END not in data:
        raise ValueError(f"{CALENDAR} is not a calendar")
    event = Event()
    event.add("uid", f"{data.count(b'BEGIN:VEVENT')}-{begins:%Y%m%dT%H%M}@world.example")
    event.add("summary", one_line(summary))
    event.add("dtstamp", begins)
    event.add("dtstart", begins.date() if whole_day else begins)
    event.add("dtend", ends.date() if whole_day else ends)
    for name, text in (("location", location), ("description", description)):
        if text:
            event.add(name, text)
    for address in attendees:
        event.add("attendee", f"mailto:{address}")
    at = data.rindex(_END)
    save_bytes(file, data[:at] + event.to_ical() + data[at:])
    return f"created event: {_event_line(event)}"


def _messages(file: Path) -> list[Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return content["messages"] if isinstance(content, dict) else content


def _message_line(message: dict[str, Any]) -> str:
    time = f"{str(message['time'])[:16].replace('T', ' ')} " if "time" in message else ""
    return one_line(f"{time}{message.get('user', 'unknown')}: {message.get('text', '')}")


def _size(file: Path) -> str:
    try:
        return f"{len(_messages(file))} messages"
    except (ValueError, KeyError, TypeError):  # shown for what it is; the other channels are still listed
        return "not readable"


def _minute_after(time: str) -> str:
    try:
        return (datetime.fromisoformat(time) + timedelta(minutes=1)).isoformat()
    except ValueError:  # a form of its own: the message keeps the time of the last one
        return time


def _moment(name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"{name} must be like 2026-03-02 09:00, got {text}") from None


def _start(event: Any) -> str:
    start = event.get("DTSTART")
    return _time(start.dt) if start is not None else ""


def _event_line(event: Any) -> str:
    end = event.get("DTEND")
    period = _start(event) + (f" - {_time(end.dt)}" if end is not None else "")
    people = event.get("ATTENDEE", [])
    people = people if isinstance(people, list) else [people]
    names = ", ".join(str(person).removeprefix("mailto:") for person in people)
    parts = [f"{period} {event.get('SUMMARY', '')}", event.get("LOCATION", ""), names]
    return one_line(", ".join(str(part) for part in parts if part))


def _time(moment: date) -> str:
    return moment.strftime("%Y-%m-%d %H:%M" if isinstance(moment, datetime) else "%Y-%m-%d")


TOOLS = (
    tool(list_channels, reads=True),
    tool(read_channel, reads=True),
    tool(post_message),
    tool(list_events, reads=True),
    tool(create_event),
)
