"""`dflash-mlx chat`: from a pipe and in a terminal, one conversation with its caches, commands, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import time
from collections.abc import Iterator

import pytest
from command import POCKET_LINE, run, start

import dflash_mlx
from dflash_mlx.chat.answer import Answer, AnswerReader
from dflash_mlx.chat.conversation import Conversation

QUESTION, SECOND = "Write a function that adds.", "Now one that divides."
STATS = re.compile(r"prompt (\d+) tokens, (\d+) of them reused · (\d+) rounds, (\d+) of (\d+) drafts accepted · seed")


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


def answered(pair, messages, **options) -> Answer:
    """The answer to messages from a session of its own."""
    out, answer = dflash_mlx.generate(pair, messages, **options), Answer()
    reader = AnswerReader(pair.tokenizer, pair.eos_token_ids)
    answer.add(reader.feed(out.tokens) + reader.finish(cut=True))
    return answer


def chat(*lines: str, flags: tuple[str, ...] = ()):
    return run("chat", "--max-tokens", "12", *flags, stdin="".join(line + "\n" for line in lines))


class TestPipe:
    """Each line of a pipe is a message or a command."""

    def test_answers_go_to_stdout_and_see_the_history(self, pair) -> None:
        first = answered(pair, [{"role": "user", "content": QUESTION}], max_tokens=12)
        said = {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning}
        messages = [{"role": "user", "content": QUESTION}, said, {"role": "user", "content": SECOND}]
        second = answered(pair, messages, max_tokens=12)
        result = chat(QUESTION, SECOND)
        assert result.exit_code == 0
        assert result.stdout == "".join(text.removesuffix("\n") + "\n" for text in (first.text, second.text) if text)
        assert result.stderr.startswith(POCKET_LINE)

    def test_second_message_reuses_the_first_ones_caches(self) -> None:
        found = STATS.search(chat(QUESTION, SECOND, "/stats").stderr)
        assert found
        prompt, reused = int(found[1]), int(found[2])
        assert prompt > reused > 80  # more than the system's message and the first question

    def test_quiet_says_nothing_but_the_answer(self) -> None:
        assert chat(QUESTION, flags=("--quiet",)).stderr == ""

    def test_lines_that_end_in_a_backslash_are_joined(self, pair) -> None:
        expected = answered(pair, [{"role": "user", "content": "a\nb"}], max_tokens=12)
        assert chat("a\\", "b", flags=("-q",)).stdout.rstrip("\n") == expected.text.rstrip("\n")

    def test_double_slash_begins_a_message(self, pair) -> None:
        expected = answered(pair, [{"role": "user", "content": "/quit"}], max_tokens=12)
        assert chat("//quit", flags=("-q",)).stdout.rstrip("\n") == expected.text.rstrip("\n")

    def test_system_and_reasoning_reach_the_template(self, pair) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        expected = answered(pair, messages, max_tokens=12, reasoning="low")
        for lines, flags in (([], ("--reasoning", "low")), (["/reasoning low"], ())):
            found = chat(*lines, QUESTION, flags=("-q", "--system", "Be brief.", *flags))
            assert found.stdout.rstrip("\n") == expected.text.rstrip("\n")

    def test_reset_forgets(self) -> None:
        once, again = chat(QUESTION, flags=("-q",)), chat(SECOND, "/reset", QUESTION, flags=("-q",))
        assert again.stdout.endswith(once.stdout)

    def test_draft_length_is_used(self) -> None:
        found = STATS.search(chat("/draft 3", QUESTION, "/stats").stderr)
        plain = STATS.search(chat("/draft 0", QUESTION, "/stats").stderr)
        assert found
        assert plain
        assert int(found[5]) > int(plain[5]) == 0

    def test_the_automatic_length_chooses_the_width_of_blocks_itself(self) -> None:
        """What `--whole-block` asked for holds for fixed lengths."""
        result = chat("/draft auto", QUESTION, "/draft 3", flags=("--draft-length", "3", "--whole-block"))
        assert result.exit_code == 0, result.stderr
        assert "Draft length: auto." in result.stderr

    def test_quit_leaves(self) -> None:
        result = chat("/quit", QUESTION)
        assert (result.exit_code, result.stdout, result.stderr) == (
            0,
            "",
            POCKET_LINE + result.stderr[len(POCKET_LINE) :],
        )
        assert "tok/s" not in result.stderr


WRONG = [
    ("/foo", "the command must be one of /reset, /save, /load, /stats, /draft, /reasoning, /quit but got /foo."),
    ("/draft 16", "draft_length must be 'auto' or between 0 and 15 (the drafter's block of 16 less its anchor)"),
    ("/draft x", "draft_length must be 'auto' or an integer of at least 0 but got 'x'."),
    ("/reasoning most", "reasoning must be one of low, medium, high, xhigh but got 'most'."),
    ("/save", "/save must be followed by a file but got nothing. Write /save FILE."),
    ("/load no-such-file", "no-such-file must be a conversation that /save wrote (version 1) but got No such file"),
    ("word " * 5000, "prompt must be at most 4096 tokens but got"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line[:16] for line, _ in WRONG])
def test_wrong_line_ends_a_pipe_with_its_message(line, message) -> None:
    result = chat(line)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_bytes_that_are_no_text_are_refused() -> None:
    result = run("chat", stdin=b"abc\xff\n")
    assert result.exit_code == 2
    assert "[chat] the message must be UTF-8 text but got other bytes" in result.stderr


def test_saved_conversation_goes_on_where_it_was(tmp_path) -> None:
    file = tmp_path / "talk.json"
    whole = chat(QUESTION, f"/save {file}", SECOND, flags=("-q",)).stdout
    loaded = chat(f"/load {file}", SECOND, "/stats", flags=("-q",))
    assert loaded.stdout
    assert whole.endswith(loaded.stdout)
    assert "Loaded 2 messages.\n" in loaded.stderr
    found = STATS.search(loaded.stderr)
    assert found
    assert int(found[2]) > 80  # tokens that the saved caches held
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["user", "assistant"]


def test_conversation_without_its_caches_says_so_and_goes_on(tmp_path) -> None:
    file = tmp_path / "talk.json"
    whole = chat(QUESTION, f"/save {file}", SECOND, flags=("-q",)).stdout
    caches = tmp_path / "talk.json.session"
    caches.write_bytes(caches.read_bytes()[:-1])
    loaded = chat(f"/load {file}", SECOND, flags=("-q",))
    assert whole.endswith(loaded.stdout)
    assert "The caches are computed again: [session]" in loaded.stderr
    caches.unlink()
    loaded = chat(f"/load {file}", SECOND, flags=("-q",))
    assert whole.endswith(loaded.stdout)
    assert loaded.stderr == "Loaded 2 messages. The caches are computed again: there is no talk.json.session.\n"


def test_conversation_that_was_saved_before_its_first_message_is_complete(tmp_path) -> None:
    result = chat(f"/save {tmp_path / 'talk.json'}", f"/load {tmp_path / 'talk.json'}", flags=("-q",))
    assert (result.exit_code, result.stderr) == (0, "Saved 0 messages.\nLoaded 0 messages.\n")


KIND = '{"format": "dflash-mlx chat", "version": '
ASKED = '[{"role": "user", "content": "a"}]'
CANNOT_GO_ON = [
    (KIND + '1, "messages": [{"role": "boss"}]}', "messages[0].role must be one of"),
    (KIND + f'1, "messages": {ASKED}, "reasoning": "huge"}}', "reasoning must be one of low, medium, high, xhigh but"),
    (KIND + f'1, "messages": {ASKED}, "reasoning": ["low"]}}', "reasoning must be one of low, medium, high, xhigh but"),
    (KIND + f'1, "messages": {ASKED.replace("a", "word " * 5000)}}}', "prompt must be at most 4096 tokens but got"),
    (
        KIND + f'1, "messages": {ASKED.replace("a", chr(92) + "ud800")}}}',
        "messages must be Unicode text but got the half character",
    ),
]
BROKEN_FILES = ["", "[]", "{}", KIND + "2}", KIND + "1}", "[" * 100_000, *(text for text, _ in CANNOT_GO_ON)]


@pytest.mark.parametrize(("text", "why"), CANNOT_GO_ON, ids=range(len(CANNOT_GO_ON)))
def test_loaded_file_with_which_no_message_could_follow_says_why(text, why, pair, tmp_path) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(dflash_mlx.InputError) as caught:
        Conversation(dflash_mlx.Session(pair)).load(tmp_path / "f")
    assert f"{tmp_path / 'f'} must be a conversation" in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("text", BROKEN_FILES, ids=range(len(BROKEN_FILES)))
def test_wrong_file_changes_nothing(text, pair, tmp_path) -> None:
    talk = Conversation(dflash_mlx.Session(pair), "Be brief.", "low")
    before = (list(talk.messages), talk.system, talk.reasoning)
    (tmp_path / "f").write_text(text)
    with pytest.raises(dflash_mlx.InputError):
        talk.load(tmp_path / "f")
    assert (talk.messages, talk.system, talk.reasoning) == before


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_stopped_answer_stays_in_the_conversation(pieces, pair) -> None:
    talk = Conversation(dflash_mlx.Session(pair))
    stream = talk.ask(QUESTION, max_tokens=60)
    shown = "".join(next(stream).text for _ in range(pieces))
    stream.close()
    if not pieces:
        assert talk.messages == []
    else:
        assert talk.finish_reason == "cancelled"
        assert talk.messages[0] == {"role": "user", "content": QUESTION}
        assert talk.messages[1]["content"].startswith(shown)
    fresh = Conversation(dflash_mlx.Session(pair))
    fresh.messages = list(talk.messages)
    for each in (talk, fresh):
        assert "".join(piece.text for piece in each.ask(SECOND, max_tokens=12))
    assert talk.answer == fresh.answer


def test_stop_string_ends_the_answer(pair) -> None:
    talk = Conversation(dflash_mlx.Session(pair))
    whole = "".join(piece.text for piece in talk.ask(QUESTION, max_tokens=40))
    stop = whole[10:14]
    talk.reset()
    assert "".join(piece.text for piece in talk.ask(QUESTION, max_tokens=40, stop=stop)) == whole[: whole.index(stop)]
    assert talk.finish_reason == "stop"


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str):
        self.master, slave = pty.openpty()
        self.process = start("chat", *arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                             preexec_fn=lambda: _control(slave))  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def press_until(self, key: str, text: str) -> None:
        """Press a key again and again: readline misses a signal that comes just before it waits for the next key."""
        for _ in range(20):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.wait_for(text, seconds=3)
                return
        raise AssertionError(f"{text!r} did not come: {self.seen!r}")

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Read until `text` has been shown after what was waited for before; returns what came before it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before


def _control(terminal: int) -> None:
    """Make the terminal the one that Ctrl-C reaches this process from."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("--max-tokens", "1500", "--draft-length", "2")
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.master)


def test_terminal_stops_an_answer_and_goes_on(terminal) -> None:
    terminal.wait_for("Ctrl-D leaves.")
    terminal.wait_for("> ")
    terminal.press_until("\x03", "(/quit or Ctrl-D leaves.)")
    terminal.type(QUESTION + "\n")
    terminal.wait_for("value")  # it has begun to answer
    terminal.type("\x03")
    terminal.wait_for("cancelled · ")
    terminal.type("/foo\n")  # an error keeps the conversation
    terminal.wait_for("Error: [chat] the command")
    terminal.type("/stats\n")
    terminal.wait_for("2 messages")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
