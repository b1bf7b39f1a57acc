"""Chat channels: chat/<channel>.json, a list of messages with `user` and `text`."""

from __future__ import annotations

import json
from pathlib import Path

from system.tools.paths import inside
from system.tools.registration import tool
from system.tools.results import joined, matches, one_line

FOLDER = "chat"


def read_channel(root: Path, channel: str, find: str = "") -> str:
    """Read a chat channel; find keeps messages that contain a text."""
    lines = message_lines(channel_file(root, channel))
    return joined((line for line in lines if matches(find, line)), rest="narrow with find")


def channel_file(root: Path, channel: str) -> Path:
    """The file of a channel that is there; its name may begin with #."""
    name = channel.removeprefix("#")
    file = inside(root, f"{FOLDER}/{name}.json")
    if not file.is_file():
        channels = sorted(path.stem for path in (root / FOLDER).glob("*.json"))
        raise ValueError(f"no such channel {channel}; channels here: {', '.join(channels) or 'none'}")
    return file


def message_lines(file: Path) -> list[str]:
    """Give every message of a channel as `user: text`."""
    content = json.loads(file.read_text(encoding="utf-8"))
    messages = content["messages"] if isinstance(content, dict) else content
    return [one_line(f"{message['user']}: {message['text']}") for message in messages]


TOOLS = (tool(read_channel, reads=True),)
