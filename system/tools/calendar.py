"""The calendar of a world: calendar.ics, one line an event."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from icalendar import Calendar

from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import joined, matches, one_line

CALENDAR = "calendar.ics"


def list_events(root: Path, find: str = "") -> str:
    """List calendar events; find keeps those that contain a text."""
    lines = event_lines(existing_file(root, CALENDAR))
    return joined((line for line in lines if matches(find, line)), rest="narrow with find")


def event_lines(file: Path) -> list[str]:
    """Give every event as `2026-03-02 09:00 summary`, by start; an event of a whole day has no time."""
    calendar = Calendar.from_ical(file.read_bytes())
    return sorted(_line(event) for event in calendar.walk("VEVENT"))


def _line(event: object) -> str:
    start = event.start  # pyright: ignore[reportAttributeAccessIssue]
    form = "%Y-%m-%d %H:%M" if isinstance(start, datetime) else "%Y-%m-%d"
    return one_line(f"{start.strftime(form)} {event.get('SUMMARY', '')}")  # pyright: ignore[reportAttributeAccessIssue]


TOOLS = (tool(list_events, reads=True),)
