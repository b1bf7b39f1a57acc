"""Mail of the set `full`: dates, recipients and attachments too; messages sent, answered, forwarded."""

from __future__ import annotations

import mimetypes
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage, Message
from email.policy import default as POLICY
from email.utils import format_datetime, getaddresses, parsedate_to_datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, NamedTuple

from system.tools.arguments import NO_STRINGS
from system.tools.mail import MAILBOX, body_of, header_of, mailbox_messages
from system.tools.paths import existing_file, inside
from system.tools.registration import tool
from system.tools.results import NO_MATCH, matches, one_line
from system.tools.saving import name_of, new_file, save_bytes

_ADDRESS = re.compile(r"[^@\s<>,;]+@[^@\s<>,;]+")

_SENT = "<sent."
"""How the ids of messages begin that were sent from here."""

Addresses = Annotated[list[str], 'mail addresses, like ["ana@norvik.example"]']


class Letter(NamedTuple):
    """A message with its id: `Letter("m1", message)`."""

    id: str
    message: Message

    def header(self, name: str) -> str:
        """A header, decoded; "" if it is missing."""
        return header_of(self.message, name)

    @property
    def date(self) -> datetime | None:
        """When it was sent; None if it does not say."""
        try:
            sent = parsedate_to_datetime(self.header("Date"))
        except (TypeError, ValueError):
            return None
        return sent if sent.tzinfo else sent.replace(tzinfo=UTC)

    @property
    def line(self) -> str:
        """The message in one line of a list."""
        date = f"{self.date:%Y-%m-%d %H:%M}" if self.date else "no date"
        mark = " | with attachments" if any(True for _ in attachments(self.message)) else ""
        return f"{self.id} | {date} | {self.header('From')} | {self.header('Subject')}{mark}"

    @property
    def text(self) -> str:
        """The body as text; without a plain part, what the HTML shows."""
        parts = [part.get_content_type() for part in self.message.walk()]
        body = body_of(self.message)
        return html_text(body) if "text/html" in parts and "text/plain" not in parts else body


def list_mail(
    root: Path,
    start: Annotated[int, "the first message to list, from 1"] = 1,
    count: Annotated[int, "how many; all if 0"] = 0,
) -> str:
    """List mail as id | date | from | subject, the oldest first."""
    letters = _letters(root)
    if start < 1 or count < 0:
        raise ValueError(f"start must be positive and count not negative, got {start} and {count}")
    chosen = letters[start - 1 : start - 1 + count if count else None]
    return "\n".join(letter.line for letter in chosen) or f"no mail from {start} on; there are {len(letters)}"


def search_mail(
    root: Path,
    query: Annotated[str, "a text in the subject or the body"] = "",
    sender: Annotated[str, "a part of the sender"] = "",
    recipient: Annotated[str, "a part of a recipient"] = "",
    after: Annotated[str, "a date like 2026-03-02"] = "",
    before: Annotated[str, "a date like 2026-03-02"] = "",
) -> str:
    """Find mail by text, sender, recipient, and date; all that is given must hold."""
    earliest, latest = _day("after", after), _day("before", before)
    found = []
    for letter in _letters(root):
        recipients = f"{letter.header('To')} {letter.header('Cc')}"
        date = letter.date.replace(tzinfo=None) if letter.date else None
        if (
            matches(sender, letter.header("From"))
            and matches(recipient, recipients)
            and (not query or matches(query, letter.header("Subject")) or matches(query, letter.text))
            and (earliest is None or (date is not None and date >= earliest))
            and (latest is None or (date is not None and date < latest))
        ):
            found.append(letter.line)
    return "\n".join(found) or NO_MATCH


def read_mail(root: Path, id: Annotated[str, "like m1"]) -> str:
    """Read one mail by its id, with its headers and the names of its attachments."""
    letter = _letter(root, id)
    names = ("From", "To", "Cc", "Date", "Subject")
    head = [f"{name}: {letter.header(name)}" for name in names if letter.header(name)]
    files = [f"{name} ({len(data)} bytes)" for name, data in attachments(letter.message)]
    head += [f"Attachments: {', '.join(files)}"] if files else []
    return "\n".join([*head, "", letter.text])


def save_attachment(root: Path, id: Annotated[str, "of the mail, like m1"], name: str, path: str = "") -> str:
    """Save an attachment of a mail as a file, under its own name if no path is given."""
    found = dict(attachments(_letter(root, id).message))
    if name not in found:
        raise ValueError(f"no attachment {name} in {id}; attachments: {', '.join(found) or 'none'}")
    file = new_file(root, path or Path(name).name)
    save_bytes(file, found[name])
    return f"saved {len(found[name])} bytes as {name_of(root, file)}"


def send_mail(
    root: Path,
    to: Addresses,
    subject: str,
    body: str,
    cc: Addresses = NO_STRINGS,
    attachments: Annotated[list[str], "paths of files"] = NO_STRINGS,
) -> str:
    """Send a mail from the owner of the mailbox; it is kept in the mailbox."""
    message = _new_message(root, to, cc, subject, body)
    for path in attachments:
        file = existing_file(root, path)
        kind, _, subtype = (mimetypes.guess_type(file.name)[0] or "application/octet-stream").partition("/")
        message.add_attachment(file.read_bytes(), maintype=kind, subtype=subtype, filename=file.name)
    return _sent(root, message)


def reply_mail(
    root: Path,
    id: Annotated[str, "of the mail that is answered, like m1"],
    body: str,
    all: Annotated[bool, "answer every recipient, not only the sender"] = False,
) -> str:
    """Answer a mail; the answer is kept in the mailbox."""
    letter = _letter(root, id)
    own = _owner(_letters(root))
    to = [letter.header("Reply-To") or letter.header("From")]
    others = [address for _, address in getaddresses([letter.header("To"), letter.header("Cc")])]
    cc = (
        [address for address in others if address and address not in (own, *_addresses("to", to))]
        if all
        else []
    )
    subject = letter.header("Subject")
    subject = subject if subject.lower().startswith("re:") else f"Re: {subject}"
    message = _new_message(root, to, cc, subject, body)
    if letter.header("Message-ID"):
        message["In-Reply-To"] = letter.header("Message-ID")
        message["References"] = f"{letter.header('References')} {letter.header('Message-ID')}".strip()
    return _sent(root, message)


def attachments(message: Message) -> Iterator[tuple[str, bytes]]:
    """Give name and bytes of everything that is attached."""
    for number, part in enumerate(message.walk()):
        name = part.get_filename()
        if part.is_multipart() or not (name or part.get_content_disposition() == "attachment"):
            continue
        data = part.get_payload(decode=True)
        yield one_line(name or f"part{number}").replace("/", "_"), data if isinstance(data, bytes) else b""


def html_text(html: str) -> str:
    """What a page of HTML shows, its blocks as lines."""
    reader = _Html()
    reader.feed(html)
    reader.close()
    lines = [one_line(line) for line in "".join(reader.found).split("\n")]
    return "\n".join(line for line in lines if line)


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in ("style", "script", "title")
        self.found.append({"td": " | ", "th": " | ", "span": "", "b": "", "i": "", "a": ""}.get(tag, "\n"))

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("style", "script", "title") and self.hidden > 0

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.found.append(one_line(data) + " " if data.strip() else " ")


def _letters(root: Path) -> list[Letter]:
    return [Letter(f"m{n}", m) for n, m in enumerate(mailbox_messages(existing_file(root, MAILBOX)), 1)]


def _letter(root: Path, id: str) -> Letter:
    letters = _letters(root)
    for letter in letters:
        if letter.id == id.strip():
            return letter
    raise ValueError(f"no such mail {id}; ids: m1 to m{len(letters)}")


def _day(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"{name} must be a date like 2026-03-02, got {text}") from None


def _addresses(name: str, given: list[str]) -> list[str]:
    found = [address for _, address in getaddresses(given) if address]
    wrong = [text for text in (found or given) if not _ADDRESS.fullmatch(text)]
    if wrong or not found:
        raise ValueError(f"{name} must be mail addresses, got {', '.join(wrong or given) or 'none'}")
    return found


def _owner(letters: list[Letter]) -> str:
    """Whose mailbox this is: who gets most of what was not sent from here."""
    received = [
        letter.header("To") for letter in letters if not letter.header("Message-ID").startswith(_SENT)
    ]
    counts = Counter(address for _, address in getaddresses(received) if address)
    return counts.most_common(1)[0][0] if counts else "office@world.example"


def _new_message(root: Path, to: list[str], cc: list[str], subject: str, body: str) -> EmailMessage:
    letters = _letters(root) if (root / MAILBOX).is_file() else []
    # The world has a time of its own: a minute after its last mail.
    last = max((letter.date for letter in letters if letter.date), default=datetime(2026, 1, 1, tzinfo=UTC))
    owner = _owner(letters)
    message = EmailMessage(policy=POLICY)
    message["From"] = owner
    message["To"] = ", ".join(_addresses("to", to))
    if cc:
        message["Cc"] = ", ".join(_addresses("cc", cc))
    message["Subject"] = one_line(subject)
    message["Date"] = format_datetime(last + timedelta(minutes=1))
    message["Message-ID"] = f"{_SENT}{len(letters) + 1}@{owner.partition('@')[2]}>"
    message.set_content(body.rstrip() + "\n")
    return message


def _sent(root: Path, message: EmailMessage) -> str:
    file = inside(root, MAILBOX)
    if file.exists() and not file.is_file():
        raise ValueError(f"{MAILBOX} is no ordinary file")
    before = file.read_bytes() if file.exists() else b""
    if before and not before.endswith(b"\n\n"):
        before += b"\n" if before.endswith(b"\n") else b"\n\n"
    text = re.sub(rb"^(>*From )", rb">\1", message.as_bytes(), flags=re.MULTILINE)
    sent = parsedate_to_datetime(str(message["Date"]))
    stamp = f"From {message['From']} {sent:%a %b %d %H:%M:%S %Y}\n"
    save_bytes(file, before + stamp.encode() + text.rstrip(b"\n") + b"\n\n")
    number = len(mailbox_messages(file))
    names = [name for name, _ in attachments(message)]
    attached = f", attached: {', '.join(names)}" if names else ""
    recipients = ", ".join(str(message[name]) for name in ("To", "Cc") if message[name])
    return f"sent m{number} to {recipients}: {message['Subject']}{attached}"


def mail_lines(file: Path) -> list[str]:
    """Give every message of a mailbox as its line in a list, its recipients, and the lines of its body."""
    lines = []
    for number, message in enumerate(mailbox_messages(file), 1):
        letter = Letter(f"m{number}", message)
        lines += [letter.line, f"To: {letter.header('To')}", *letter.text.splitlines()]
    return lines


TOOLS = (
    tool(list_mail, reads=True),
    tool(search_mail, reads=True),
    tool(read_mail, reads=True),
    tool(save_attachment),
    tool(send_mail),
    tool(reply_mail),
)
