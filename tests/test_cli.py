"""The command line: what goes where, what a flag means, exit codes, and the text of each message."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import click
import pytest
from command import POCKET_LINE, PROMPT, ROOT, run, start

from dflash_mlx.cli import cli
from dflash_mlx.cli.render import size, summary_line
from dflash_mlx.cli.shared import LOAD_FLAGS, Size
from dflash_mlx.errors import CheckpointError, DFlashError, InputError
from dflash_mlx.stats import Generation, Round, Stats

generate_module = sys.modules["dflash_mlx.cli.generate"]  # the package has the command under this name
SUMMARY = re.compile(
    r"(\d+) tokens · [\d.]+ tok/s · first token [\d.]+ s · mean accepted [\d.]+ · "
    r"mean length [\d.]+ \(with the target's own token\) · peak memory [\d.]+ [MG]B\n"
)


@pytest.fixture(scope="module")
def expected() -> Callable[..., Generation]:
    """Generate through the Python API, with the pocket pair."""
    import dflash_mlx

    pair = dflash_mlx.load("pocket")
    return lambda prompt=PROMPT, **options: dflash_mlx.generate(pair, prompt, **options)


class TestHelp:
    """``--help`` and ``--version``."""

    def test_help_imports_no_model_library(self) -> None:
        code = (
            "import sys; from dflash_mlx.cli import cli\n"
            "try: cli(['--help'])\n"
            "except SystemExit: pass\n"
            "heavy = ('mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'numpy')\n"
            "print([name for name in heavy if name in sys.modules])"
        )
        out, _ = start(main=code).communicate(timeout=60)
        assert out.decode().splitlines()[-1] == "[]"

    def test_help_lists_the_commands_that_exist(self) -> None:
        commands = run("--help").output.split("Commands:")[1].split("Examples:")[0]
        listed = re.findall(r"^  (\w+)  ", commands, re.MULTILINE)
        assert listed == ["bench", "chat", "convert", "doctor", "generate", "serve", "tune", "verify"]

    @pytest.mark.parametrize("command", [*cli.commands, "bench report"])
    def test_each_command_shows_examples(self, command: str) -> None:
        result = run(*command.split(), "--help")
        assert result.exit_code == 0
        assert f"Examples:\n    dflash-mlx {command}" in result.output

    @pytest.mark.parametrize("command", [*cli.commands, "bench report"])
    def test_the_page_on_the_command_line_says_where_each_command_writes(self, command: str) -> None:
        assert f"| `{command}`" in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

    def test_generate_has_a_flag_for_every_option_with_its_default(self) -> None:
        from dflash_mlx.options import Options

        shown = " ".join(run("generate", "--help").output.split())
        for option in fields(Options):
            if not option.init or option.name in ("logit_bias", "logits_processors"):
                continue
            found = re.search(rf"--{option.name.replace('_', '-')} (.*?)(?= --|$)", shown)
            assert found, option.name
            if option.default not in (None, (), False):
                assert f"[default: {option.default}]" in found[1]

    def test_no_flag_is_unknown_to_the_library(self) -> None:
        from dflash_mlx.options import Options

        names = {parameter.name for parameter in cli.commands["generate"].params}
        options = names - set(LOAD_FLAGS) - {"prompt", "as_json", "quiet", "rounds"}
        assert options == {item.name for item in fields(Options) if item.init} - {"logit_bias", "logits_processors"}

    def test_version_names_the_distribution(self) -> None:
        assert re.fullmatch(r"dflash-mlx \(dflash-mlx-muse\) \S.*\n", run("--version").output)


BAD_INPUT = [
    (
        ["generate"],
        "Missing argument 'PROMPT'. Give a text, or - to read it from standard input.",
    ),
    (
        ["generate", "x", "--draft", "y", "--no-draft"],
        "--draft and --no-draft exclude each other. Leave one of them out.",
    ),
    (
        ["generate", "x", "--max-memory", "24 cows"],
        "Invalid value for '--max-memory': '24 cows' is not a number of bytes; write 24GB, 512MiB or 1000000.",
    ),
    (
        ["generate", "x", "--draft-length", "many"],
        "Invalid value for '--draft-length': 'many' is neither 'auto' nor a number of tokens.",
    ),
    (
        ["generate", "x", "--max-tokens", "0"],
        "[generate] max_tokens must be an integer of at least 1 but got 0. Correct the option.",
    ),
    (
        ["generate", "x", "--max-tokens", "ten"],
        "Invalid value for '--max-tokens': 'ten' is not a valid integer.",
    ),
    (
        ["generate", "x", "--temperature", "-1"],
        "[generate] temperature must be a number of at least 0 but got -1.0. Correct the option.",
    ),
    (
        ["generate", "x", "--top-p", "2"],
        "[generate] top_p must be a number between 0 and 1 but got 2.0. Correct the option.",
    ),
    (
        ["generate", "x", "--draft-length", "16"],
        "[generate] draft_length must be 'auto' or between 0 and 15 (the drafter's block of 16 less its anchor)"
        " but got 16. Leave it out to let the runtime choose.",
    ),
    (
        ["generate", "x", "--model", "./no-such-folder"],
        "[load] the model must be an existing folder or a hub id (org/name) but got './no-such-folder'."
        " Check the spelling of the path.",
    ),
    (
        ["generate", "x", "--kernels", "cuda"],
        "[load] kernels must be one of auto, stock, metal but got 'cuda'. Leave it out to let the runtime choose.",
    ),
    (["generate", "x", "--tempature", "1"], "No such option '--tempature'."),
    (["genrate", "x"], "No such command 'genrate'."),
]


class TestBadInput:
    """Wrong input: exit code 2, the reason on stderr, nothing on stdout."""

    @pytest.mark.parametrize(
        ("arguments", "message"), BAD_INPUT, ids=[" ".join(case[0][1:]) or "bare" for case in BAD_INPUT]
    )
    def test_message_says_what_is_wrong(self, arguments: list[str], message: str) -> None:
        result = run(*arguments)
        assert f"Error: {message}" in result.stderr
        assert result.exit_code == 2
        assert result.stdout == ""

    def test_an_error_of_the_library_has_the_same_text_in_python(self) -> None:
        import dflash_mlx

        with pytest.raises(InputError) as caught:
            dflash_mlx.load("./no-such-folder")
        assert f"Error: {caught.value}\n" == run("generate", "x", "--model", "./no-such-folder").stderr

    def test_stdin_that_is_no_text_is_refused(self) -> None:
        result = run("generate", "-", stdin=b"abc\xff")
        assert "Error: [generate] prompt must be UTF-8 text but got other bytes ('utf-8' codec" in result.stderr
        assert "position 3" in result.stderr
        assert result.stderr.rstrip().endswith("Convert it first, for example with iconv.")
        assert result.exit_code == 2

    def test_prompt_that_is_no_text_is_refused(self) -> None:
        result = run("generate", "abc\udcff")
        assert "[generate] prompt must be UTF-8 text" in result.stderr
        assert result.exit_code == 2

    @pytest.mark.parametrize(
        ("error", "code"), [(InputError("[a] b"), 2), (CheckpointError("[a] b"), 2), (DFlashError("[a] b"), 1)]
    )
    def test_kind_of_error_decides_the_exit_code(
        self, monkeypatch: pytest.MonkeyPatch, error: DFlashError, code: int
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(generate_module, "load_pair", fail)
        result = run("generate", "x")
        assert result.exit_code == code
        assert result.stderr == POCKET_LINE + "Error: [a] b\n"


class TestGenerate:
    """One prompt in, text on stdout, all else on stderr."""

    def test_text_goes_to_stdout_and_the_rest_to_stderr(self, expected: Callable[..., Generation]) -> None:
        result = run("generate", PROMPT, "--max-tokens", "24")
        assert result.exit_code == 0
        assert result.stdout == expected(max_tokens=24).text.removesuffix("\n") + "\n"
        assert result.stderr.startswith(POCKET_LINE)
        found = SUMMARY.fullmatch(result.stderr.removeprefix(POCKET_LINE))
        assert found
        assert int(found[1]) == 24

    def test_stdin_is_the_prompt_where_it_is_a_dash(self, expected: Callable[..., Generation]) -> None:
        prompt = "import os\n\n# größe\ndef main"
        result = run("generate", "-", "--max-tokens", "12", "--json", stdin=prompt)
        assert json.loads(result.stdout)["tokens"] == expected(prompt, max_tokens=12).tokens

    def test_json_is_one_object_with_all_that_python_gives(self, expected: Callable[..., Generation]) -> None:
        result = run("generate", PROMPT, "--max-tokens", "16", "--json")
        assert result.stdout.count("\n") == 1
        found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        wanted = expected(max_tokens=16).to_dict()
        assert [found[name] for name in ("text", "tokens", "finish_reason")] == [
            wanted[name] for name in ("text", "tokens", "finish_reason")
        ]
        assert found["stats"].keys() == wanted["stats"].keys()
        assert SUMMARY.search(result.stderr)

    def test_quiet_leaves_stderr_empty(self) -> None:
        result = run("generate", PROMPT, "--max-tokens", "4", "--quiet")
        assert (result.stderr, result.exit_code) == ("", 0)
        assert result.stdout

    def test_options_reach_the_library(self, expected: Callable[..., Generation]) -> None:
        flags = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 11}
        flags |= {"repetition_penalty": 1.3, "repetition_context": 8, "draft_length": 3, "prefill_step_size": 5}
        arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        found = json.loads(run("generate", PROMPT, "--json", *arguments).stdout)
        wanted = expected(**flags)
        assert found["tokens"] == wanted.tokens
        assert found["tokens"] != expected(**(flags | {"seed": 12})).tokens
        assert max(round_["drafted"] for round_ in found["stats"]["rounds"]) == 3
        assert found["stats"]["seed"] == 11

    def test_each_stop_text_counts(self, expected: Callable[..., Generation]) -> None:
        text = expected(max_tokens=32).text
        stops = [text[10:13], "never in a text"]
        result = run("generate", PROMPT, "--max-tokens", "32", "--stop", stops[0], "--stop", stops[1], "--json")
        found = json.loads(result.stdout)
        assert found["finish_reason"] == "stop"
        assert found["text"] == text[: text.index(stops[0])]

    def test_without_a_drafter_the_summary_says_why_nothing_is_drafted(
        self, expected: Callable[..., Generation]
    ) -> None:
        result = run("generate", PROMPT, "--max-tokens", "8", "--no-draft")
        assert re.search(r" · speculation off: [a-z].* · peak memory", result.stderr)
        assert result.stdout.removesuffix("\n") == expected(max_tokens=8).text.removesuffix("\n")

    def test_a_long_prompt_shows_no_progress_in_a_pipe(self) -> None:
        result = run("generate", "x = 1\n" * 40, "--max-tokens", "2", "--prefill-step-size", "8")
        assert result.stderr.count("\n") == 2
        assert "\x1b" not in result.stderr + result.stdout

    def test_text_comes_as_it_is_generated(self) -> None:
        waiting = (
            "import dflash_mlx.cli.generate, sys\n"
            "module = sys.modules['dflash_mlx.cli.generate']\n"
            "class Writer(module.TextWriter):\n"
            "    def write(self, text):\n"
            "        super().write(text)\n"
            "        if text.strip(): sys.stdin.readline()\n"
            "module.TextWriter = Writer"
        )
        flags = ("--max-tokens", "32", "--draft-length", "2")
        process = start("generate", PROMPT, *flags, before=waiting, stdin=subprocess.PIPE)
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1000)  # the process waits for us after each piece of text
        rest, _ = process.communicate(b"\n" * 100, timeout=60)
        assert 0 < len(first) < len(first + rest)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000", 1000),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512M", 512 * 10**6),
        ("7B", 7),
    ],
)
def test_size_understands_units(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "24 GBs"])
def test_size_refuses_the_rest(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of bytes; write 24GB, 512MiB or 1000000"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (56_000, "56 kB"), (30_100_000, "30 MB"), (17_254_000_000, "17.25 GB"), (2 * 10**12, "2.00 TB")],
)
def test_size_is_written_in_powers_of_a_thousand(count: int, text: str) -> None:
    assert size(count) == text


def test_summary_counts_the_targets_own_token_in_mean_length_alone() -> None:
    rounds = [
        Round(7, 3, 4, [], [], None, None, 0.1),
        Round(7, 4, 5, [], [], None, None, 0.1),
        Round(0, 0, 1, [], [], None, None, 0.1),
    ]
    stats = Stats(10, 0, 11, 0.123, 80.0, 45.67, 3, 250_000_000, rounds=rounds)
    assert summary_line(Generation("", [], "length", stats)) == (
        "11 tokens · 45.7 tok/s · first token 0.12 s · mean accepted 3.50 · "
        "mean length 4.50 (with the target's own token) · peak memory 250 MB"
    )


def test_summary_of_a_single_token_claims_no_speed() -> None:
    stats = Stats(generated_tokens=1, time_to_first_token_s=0.5, speculation="off: asked for")
    line = summary_line(Generation("", [], "length", stats))
    assert line == "1 token · – tok/s · first token 0.50 s · speculation off: asked for · peak memory 0 B"
