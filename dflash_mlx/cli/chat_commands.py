"""The / commands of ``dflash-mlx chat``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, must, one_of
from ..resources import user_path
from .render import SEPARATOR, size, summary_line

if TYPE_CHECKING:
    from ..chat.conversation import Conversation

HELP = (
    "/help lists the commands.",
    "/reset            forget the conversation, keep the system message",
    "/save FILE        write the conversation to FILE, its caches to FILE.session",
    "/load FILE        go on from a saved conversation",
    "/stats            what the last answer took, and what the session holds",
    "/draft N|auto     tokens to draft in a round; 0 is plain decoding",
    "/reasoning LEVEL  low, medium, high or xhigh",
    "/quit             leave (also Ctrl-D)",
    "//…               a message that begins with /",
)


class Leave(Exception):
    """The user asked for the end."""


@dataclass
class Settings:
    """What commands can change: the options of the next answer."""

    options: dict[str, Any]


def obey(line: str, talk: Conversation, settings: Settings) -> None:
    """Carry out one command; what it says goes to stderr.

    Raises:
        Leave: it was /quit.
        InputError: there is no such command, or its argument is wrong.
    """
    name, _, argument = line[1:].strip().partition(" ")
    argument = argument.strip()
    if name in ("quit", "exit"):
        raise Leave
    if name == "help":
        _say("\n".join(HELP[1:]))
    elif name == "reset":
        talk.reset()
        _say("The conversation is empty.")
    elif name == "save":
        talk.save(_path(name, argument))
        _say(f"Saved {len(talk.messages)} messages.")
    elif name == "load":
        why = talk.load(_path(name, argument))
        _say(f"Loaded {len(talk.messages)} messages." + (f" The caches are computed again: {why}" if why else ""))
    elif name == "stats":
        _say(_stats(talk))
    elif name == "draft":
        _draft(argument, talk, settings)
    elif name == "reasoning":
        _reasoning(argument, talk)
    else:
        known = ", ".join(text.split()[0] for text in HELP[1:-1])
        raise InputError(must("chat", "the command", f"one of {known}", f"/{name}", "Begin a message with //."))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _path(name: str, argument: str) -> Path:
    if not argument or "\0" in argument:
        found = repr(argument) if argument else "nothing"
        raise InputError(must("chat", f"/{name}", "followed by a file", found, f"Write /{name} FILE."))
    return user_path(argument)


def _draft(argument: str, talk: Conversation, settings: Settings) -> None:
    from ..options import AUTO, Options

    length = int(argument) if argument.isdecimal() else argument
    changed: dict[str, Any] = {"draft_length": length} | ({"whole_block": False} if length == AUTO else {})
    asked = Options(**(settings.options | changed))
    if talk.session.pair.drafter:
        asked.fixed_draft_length(talk.session.pair.block_size)
    settings.options.update(changed)
    _say(f"Draft length: {length}.")


def _reasoning(argument: str, talk: Conversation) -> None:
    from ..chat.template import STRENGTHS

    if argument not in STRENGTHS:
        todo = "Write /reasoning low, for example."
        raise InputError(must("chat", "reasoning", one_of(STRENGTHS), repr(argument), todo))
    talk.reasoning = argument
    _say(f"Reasoning strength: {argument}.")


def _stats(talk: Conversation) -> str:
    """The last answer's summary, and what the session holds."""
    session, last = talk.session, talk.session.last_generation
    held = f"{len(talk.messages)} messages{SEPARATOR}{len(session.tokens)} of {session.pair.max_context} tokens"
    if last is None:
        return held
    stats = last.stats
    return "\n".join(
        [
            summary_line(last),
            f"prompt {stats.prompt_tokens} tokens, {stats.reused_tokens} of them reused{SEPARATOR}"
            f"{len(stats.rounds)} rounds, {stats.accepted_tokens} of {stats.drafted_tokens} drafts accepted{SEPARATOR}"
            f"seed {stats.seed}",
            f"{held}{SEPARATOR}memory planned {size(session.pair.plan.total)}",
        ]
    )
