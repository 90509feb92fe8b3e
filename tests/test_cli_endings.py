"""How a run ends: Ctrl-C, a failure in the middle, a reader that leaves; and what only a terminal sees."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import MAIN, PINNED, POCKET_LINE, PROMPT, ROOT, run, start

from dflash_mlx.errors import DFlashError
from dflash_mlx.stats import Generation, Stats

generate_module = sys.modules["dflash_mlx.cli.generate"]  # the package has the command under this name


@pytest.fixture(scope="module")
def expected() -> Callable[..., Generation]:
    """Generate through the Python API, with the pocket pair."""
    import dflash_mlx

    pair = dflash_mlx.load("pocket")
    return lambda prompt=PROMPT, **options: dflash_mlx.generate(pair, prompt, **options)


class TestInterrupt:
    """Ctrl-C: what was generated is printed first, exit code 130."""

    @pytest.fixture(autouse=True)
    def _interruptible(self) -> Iterator[None]:
        """A shell starts its background jobs with SIGINT ignored; here it interrupts, as at a terminal."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    # Presses Ctrl-C from inside, when a given piece of text is written: a real signal at a known place.
    PRESS = (
        "import os, signal, sys\n"
        "import dflash_mlx.cli.generate\n"
        "module = sys.modules['dflash_mlx.cli.generate']\n"
        "def pressing(kind):\n"
        "    class Writer(kind):\n"
        "        count = 0\n"
        "        def write(self, text):\n"
        "            super().write(text)\n"
        "            self.count += 1\n"
        "            if self.count == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return Writer\n"
        "module.TextWriter = pressing(module.TextWriter)\n"
        "module._JsonWriter = pressing(module._JsonWriter)\n"
    )

    def test_text_so_far_is_kept(self, expected: Callable[..., Generation]) -> None:
        process = start("generate", PROMPT, "--max-tokens", "40", "--draft-length", "2", before=self.PRESS)
        out, err = (stream.decode() for stream in process.communicate(timeout=60))
        assert process.returncode == 130
        assert out.strip()
        assert expected(max_tokens=40).text.startswith(out.removesuffix("\n"))
        assert re.search(r"^cancelled · \d+ tokens · ", err, re.MULTILINE)
        assert err.endswith("Interrupted.\n")

    def test_json_says_cancelled(self, expected: Callable[..., Generation]) -> None:
        process = start("generate", PROMPT, "--max-tokens", "40", "--draft-length", "2", "--json", before=self.PRESS)
        out, _ = process.communicate(timeout=60)
        found = json.loads(out)
        assert process.returncode == 130
        assert found["finish_reason"] == "cancelled"
        assert 0 < len(found["tokens"]) < 40
        assert found["tokens"] == expected(max_tokens=40).tokens[: len(found["tokens"])]
        assert found["stats"]["generated_tokens"] == len(found["tokens"])

    def test_signal_from_outside_stops_a_long_run(self) -> None:
        process = start("generate", PROMPT, "--max-tokens", "5000", "--temperature", "1", "--seed", "3")
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert b"Traceback" not in err

    @pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
    def test_before_the_first_token_there_is_an_empty_answer(
        self, monkeypatch: pytest.MonkeyPatch, as_json: bool
    ) -> None:
        def press(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the signal came too late")

        monkeypatch.setattr(generate_module, "load_pair", press)
        result = run("generate", PROMPT, *(["--json"] if as_json else []))
        assert result.exit_code == 130
        if not as_json:
            assert result.stdout == ""
            return
        found = json.loads(result.stdout)
        assert (found["text"], found["tokens"], found["finish_reason"]) == ("", [], "cancelled")
        assert found["stats"]["speculation"] == "off: cancelled before the first token"

    def test_during_the_prefill_the_step_at_hand_is_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps = []

        def press(_bar: object, done: int, _total: int) -> None:
            steps.append(done)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(generate_module.PrefillBar, "__call__", press)
        result = run("generate", "x = 1\n" * 40, "--prefill-step-size", "8", "--json")
        assert result.exit_code == 130
        assert len(steps) == 1
        assert json.loads(result.stdout)["finish_reason"] == "cancelled"


class TestFailure:
    """A failure in the middle, and a reader that leaves."""

    def test_what_was_generated_before_a_failure_is_printed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        partial = Generation("half a te", [5, 6], "cancelled", Stats(generated_tokens=2))

        def broken(*_: object, **__: object) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(text="half a te", finish_reason=None)
            error = DFlashError("[round] logits must be finite but got NaN. Report this.")
            error.partial = partial
            raise error

        monkeypatch.setattr("dflash_mlx.session.Session.stream_generate", broken)
        text, as_json = run("generate", PROMPT), run("generate", PROMPT, "--json")
        assert text.stdout == "half a te\n"
        assert json.loads(as_json.stdout)["tokens"] == [5, 6]
        for result in (text, as_json):
            assert result.exit_code == 1
            assert result.stderr.endswith("Error: [round] logits must be finite but got NaN. Report this.\n")

    def test_a_reader_that_leaves_ends_the_run_without_a_traceback(self) -> None:
        process = start("generate", PROMPT, "--max-tokens", "5000", "--temperature", "1", "--seed", "3")
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.decode() == POCKET_LINE

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
    @pytest.mark.parametrize("at_once", [False, True], ids=["buffered", "written at once"])
    @pytest.mark.parametrize("arguments", [["--version"], ["generate", PROMPT, "--max-tokens", "3"]], ids=itemgetter(0))
    def test_a_full_disk_below_stdout_is_named(self, arguments: list[str], at_once: bool) -> None:
        switch = f"import sys; sys.stdout.reconfigure(write_through={at_once})\n"
        with open("/dev/full", "wb") as full:
            process = start(*arguments, before=switch, stdout=full)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        lines = err.decode().removeprefix(POCKET_LINE).splitlines()
        assert lines == [
            "Error: [dflash-mlx] stdout must be usable but got No space left on device. Send it where there is room."
        ]

    def test_characters_that_the_terminal_lacks_are_replaced(self) -> None:
        code = (
            "import sys; sys.stdout.reconfigure(encoding='ascii')\n"
            "import dflash_mlx.cli.generate\n"
            "writer = sys.modules['dflash_mlx.cli.generate'].TextWriter()\n"
            "writer.write('größe'); writer.finish(None)"
        )
        out, err = start(main=code).communicate(timeout=60)
        assert (out, err) == (b"gr??e\n", b"")


def test_standard_files_that_are_closed_do_no_harm() -> None:
    """One process for each; they run at once, for most of their time goes into imports."""
    command = (sys.executable, "-c", PINNED + MAIN, "generate", PROMPT, "--max-tokens", "3")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = {
        closed: subprocess.Popen(
            ("sh", "-c", f'exec "$@" {closed}', "sh", *command),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
    }  # fmt: skip
    for closed, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert (process.returncode, b"Traceback" in err) == (0, False), closed
        assert bool(out) == (closed in ("<&-", "2>&-")), closed


class TestTerminal:
    """What only a terminal shows."""

    def test_a_long_prompt_shows_its_progress(self) -> None:
        ours, theirs = pty.openpty()
        arguments = ("generate", "x = 1\n" * 40, "--max-tokens", "2", "--prefill-step-size", "8")
        process = start(*arguments, stderr=theirs)
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
        os.close(ours)
        out, _ = process.communicate(timeout=60)
        assert re.search(rb"prompt .*\d+/\d+", seen)
        assert b"\x1b" not in out
