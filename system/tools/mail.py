"""The mailbox of a world: mail.mbox, messages named m1, m2, ... in the order of the file."""

from __future__ import annotations

import re
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.message import Message
from pathlib import Path
from typing import NamedTuple

from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import cut, joined, matches, one_line

MAILBOX = "mail.mbox"


class Mail(NamedTuple):
    """One message, decoded: `Mail("m1", "Ana <ana@x.example>", "Norvik fee", "Norvik fee: 4821")`."""

    id: str
    sender: str
    subject: str
    body: str

    @property
    def line(self) -> str:
        """The message in one line of a list."""
        return f"{self.id} | {self.sender} | {self.subject}"


def list_mail(root: Path) -> str:
    """List all mail as id | from | subject."""
    return joined((mail.line for mail in _mails(root)), rest="use search_mail")


def search_mail(root: Path, query: str) -> str:
    """Find mail by a text in the subject or the body."""
    found = (mail.line for mail in _mails(root) if matches(query, mail.subject) or matches(query, mail.body))
    return joined(found, rest="use a longer query")


def read_mail(root: Path, id: str) -> str:
    """Read one mail by its id, like m1."""
    mails = {mail.id: mail for mail in _mails(root)}
    if id not in mails:
        raise ValueError(f"no such mail {id}; ids: m1 to m{len(mails)}")
    mail = mails[id]
    return cut(f"From: {mail.sender}\nSubject: {mail.subject}\n\n{mail.body}", rest="use search_files")


def mail_lines(file: Path) -> list[str]:
    """Give every message of a mailbox as its line in a list and the lines of its body."""
    return [line for mail in parse_mailbox(file) for line in (mail.line, *mail.body.splitlines())]


def parse_mailbox(file: Path) -> list[Mail]:
    """Read a mailbox in mbox format."""
    return [_mail(f"m{number}", message) for number, message in enumerate(mailbox_messages(file), 1)]


def mailbox_messages(file: Path) -> list[Message]:
    """Split a mailbox into its messages, in the order of the file."""
    data = file.read_bytes().replace(b"\r\n", b"\n")
    starts = [match.start() for match in re.finditer(rb"(?:\A|(?<=\n\n))From [^\n]*\n", data)]
    messages = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    return [message_from_bytes(message.split(b"\n", 1)[1]) for message in messages]


def _mails(root: Path) -> list[Mail]:
    return parse_mailbox(existing_file(root, MAILBOX))


def _mail(id: str, message: Message) -> Mail:
    return Mail(id, header_of(message, "From"), header_of(message, "Subject"), body_of(message))


def header_of(message: Message, name: str) -> str:
    """A header in one line, decoded; "" if it is missing."""
    value = str(message.get(name, ""))
    if "=?" not in value:
        return one_line(value)
    try:
        return one_line(str(make_header(decode_header(value))))
    except (HeaderParseError, LookupError, UnicodeDecodeError):
        return one_line(value)


def body_of(message: Message) -> str:
    """The text of the first plain part, or of the whole if there is none."""
    part = next((part for part in message.walk() if part.get_content_type() == "text/plain"), message)
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return ""
    charset = part.get_content_charset() or "utf-8"
    try:
        text = payload.decode(charset, errors="replace")
    except LookupError:
        text = payload.decode("utf-8", errors="replace")
    return re.sub(r"^>(>*From )", r"\1", text, flags=re.MULTILINE).strip()


TOOLS = (tool(list_mail, reads=True), tool(search_mail, reads=True), tool(read_mail, reads=True))
