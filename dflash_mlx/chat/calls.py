"""Tool calls as Muse Glimmer writes them (ATEM blocks), found in a text that comes in pieces.

    <atem:function_calls>
    <atem:invoke name="TOOL">
    <atem:parameter name="KEY">VALUE</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

A block holds one invoke or more. Strings stand as they are, other values as JSON; nothing is escaped. A value ends at
the first closing tag that is followed by the next parameter or by the end of the invoke, so a string may hold quotes,
braces and tags. The tags are ordinary text. What does not parse stays text, with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import value_of

Schemas = Mapping[str, Mapping[str, Any]]
OPEN, CLOSE = "<atem:function_calls>", "</atem:function_calls>"
INVOKE = re.compile(r'\s*<atem:invoke name="([^<>\n]+?)">\s*')
END_INVOKE = "</atem:invoke>"
PARAMETER = re.compile(r'<atem:parameter name="([^<>\n]+?)">')
END_PARAMETER = re.compile(rf'</atem:parameter>\s*(?=<atem:parameter name="|{END_INVOKE})')


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]

    def json(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Refused:
    """Text that should have been a call, and why it is none."""

    text: str
    reason: str


Found = str | Call | Refused


class Malformed(Exception):
    """An invoke that goes on in a way that no call has."""


def read_invoke(text: str, schemas: Schemas) -> tuple[Call, int] | None:
    """The invoke that `text` begins with, and where it ends; `None` where more has to come.

    Raises:
        Malformed: nothing that may come makes it a call.
    """
    begin = INVOKE.match(text)
    if not begin:
        raise Malformed(f"an invoke was expected, not {text.strip()[:40]!r}")
    name, at = begin[1], begin.end()
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    while not text.startswith(END_INVOKE, at):
        parameter = PARAMETER.match(text, at)
        if not parameter:
            raise Malformed(f"in a call of {name} a parameter was expected, not {text[at : at + 40]!r}")
        key = parameter[1]
        end = END_PARAMETER.search(text, parameter.end())
        if not end:
            return None
        if key in arguments:
            raise Malformed(f"in a call of {name} the parameter {key} stands twice")
        value = text[parameter.end() : end.start()]
        arguments[key] = value_of(value, properties.get(key), schemas.get(name, {}))
        at = end.end()
    return Call(name, arguments), at + len(END_INVOKE)


class CallReader:
    """Splits one message's body into text and calls; how it was cut into pieces makes no difference.

    White space beside a block is layout; all other text is handed out.

    Args:
        schemas: tool -> JSON schema of its parameters, which says which values are strings.
    """

    def __init__(self, schemas: Schemas):
        self._schemas = schemas
        self._text = ""  # not yet handed out
        self._inside = False  # of a block: `_text` begins with the next invoke, or with the block's end
        self._opening = ""  # the opening tag, as long as no call was read: it is part of what is refused
        self._searched = 0  # where to look for the next end of an invoke
        self._beside = False  # right behind a block: white space is dropped
        self._lost = False  # behind a malformed block all is text
        self.calls = 0

    def feed(self, text: str) -> list[Found]:
        """Take the next piece; returns what is certain now."""
        self._text += text
        found: list[Found] = []
        while (item := self._block() if self._inside else self._plain()) is not None:
            found.append(item)
        return [item for item in found if item != ""]

    def finish(self, why: str) -> list[Found]:
        """The body is over; `why` says so where a call is not complete."""
        rest, self._text = self._text, ""
        if self._inside:
            ended = not self._opening and CLOSE.startswith(rest.strip())
            return [] if ended else [Refused(self._opening + rest, why)]
        rest = rest.lstrip() if self._beside else rest
        return [rest] if rest else []

    def _plain(self) -> Found | None:
        """Text up to the next block, which is entered; `None` to wait."""
        at = -1 if self._lost else self._text.find(OPEN)
        end = at if at >= 0 else len(self._text) if self._lost else _certain(self._text)
        text, self._text = self._text[:end], self._text[end:]
        if self._beside:
            text = text.lstrip()
            self._beside = not text
        if at < 0:
            return text or None
        self._text = self._text[len(OPEN) :]
        self._inside, self._opening, self._searched = True, OPEN, 0
        return text.rstrip()

    def _block(self) -> Found | None:
        """The next call, or the end of the block; `None` to wait."""
        stripped = self._text.lstrip()
        if not self._opening and stripped.startswith(CLOSE):
            self._text = stripped[len(CLOSE) :]
            self._inside, self._beside = False, True
            return ""
        while (at := self._text.find(END_INVOKE, self._searched)) >= 0:
            self._searched = at + 1
            try:
                # Up to here only: so neither the result nor the reason depends on how much has come already.
                read = read_invoke(self._text[: at + len(END_INVOKE)], self._schemas)
            except Malformed as error:
                refused = Refused(self._opening + self._text, str(error))
                self._text, self._inside, self._lost = "", False, True
                return refused
            if read:
                call, end = read
                self._text, self._opening, self._searched = self._text[end:], "", 0
                self.calls += 1
                return call
        self._searched = max(self._searched, len(self._text) - len(END_INVOKE) + 1)
        return None


def _certain(text: str) -> int:
    """Length of the text that does not stand beside a block, whatever comes."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            text = text[:-length]
            break
    return len(text.rstrip())
