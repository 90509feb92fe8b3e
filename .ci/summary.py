"""Adds up the summary lines of several pytest runs, and prints one line of the same form as the last line.

Usage: summary.py FOLDER, where FOLDER has one file of output per suite, and the file `failures` with a line per
step that failed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

SUITES = ("default", "slow", "oracle")
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")
LINE = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([\d.]+)s.*$")


def read_counts(output: str) -> tuple[Counter[str], float] | None:
    """Give the counts and the seconds of the last summary line in pytest's output, or None without one."""
    matches = [found for line in output.splitlines() if (found := LINE.match(line.strip()))]
    if not matches:
        return None
    counts: Counter[str] = Counter()
    for number, word in re.findall(r"(\d+) ([a-z]+)", matches[-1][1]):
        counts[{"error": "errors", "warning": "warnings"}.get(word, word)] += int(number)
    return counts, float(matches[-1][2])


def add_up(folder: Path) -> tuple[list[str], str]:
    """Give a line per suite, and the line that adds them up."""
    total: Counter[str] = Counter()
    seconds, lines = 0.0, []
    for suite in SUITES:
        file = folder / suite
        found = read_counts(file.read_text(errors="replace")) if file.exists() else None
        if found is None:
            lines.append(f"{suite:<8} no summary line")
            continue
        # Tests that one suite leaves to another are no news in the sum.
        total += Counter({word: number for word, number in found[0].items() if word != "deselected"})
        seconds += found[1]
        lines.append(f"{suite:<8} {_words(found[0]) or 'no tests ran'} in {found[1]:.2f}s")
    failures = folder / "failures"
    broken = failures.read_text().splitlines() if failures.exists() else []
    # A step that failed without a failed test (a linter, an interrupted run) must show in the sum.
    total["errors"] += sum(not _failed_tests(folder / line.split()[0]) for line in broken)
    return lines + broken, f" {_words(+total) or 'no tests ran'} in {seconds:.2f}s ".center(80, "=")


def _failed_tests(file: Path) -> bool:
    """Tell whether the output in `file` has a summary line with failures or errors in it."""
    found = read_counts(file.read_text(errors="replace"))
    return found is not None and bool(found[0]["failed"] or found[0]["errors"])


def _words(counts: Counter[str]) -> str:
    """Write counts as pytest does."""
    words = []
    for word in ORDER:
        number = counts[word]
        if number:
            words.append(f"{number} {word[:-1] if number == 1 and word in ('warnings', 'errors') else word}")
    return ", ".join(words)


def main() -> None:
    """Print the lines of all suites and their sum."""
    lines, last = add_up(Path(sys.argv[1]))
    print("\n### summary", *lines, last, sep="\n")


if __name__ == "__main__":
    main()
