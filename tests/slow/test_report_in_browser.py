"""The report in a real browser without a screen: readable in light and dark, on a wide and on a narrow window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from made_result import made_result

from dflash_mlx.report.page import page

pytestmark = pytest.mark.slow
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
READABLE = 4.5  # contrast of body text, WCAG 2.2 level AA
PROBE = """
<pre id="facts"></pre><script>
const style = getComputedStyle(document.body), root = document.documentElement;
const labels = [...document.querySelectorAll('svg text')];
document.getElementById('facts').textContent = JSON.stringify({
  dark: matchMedia('(prefers-color-scheme: dark)').matches,
  ground: style.backgroundColor, ink: style.color,
  soft: [...document.querySelectorAll('.soft, figcaption')].map(e => getComputedStyle(e).color),
  labels: labels.map(e => getComputedStyle(e).fill),
  plots: [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect()).map(b => [b.width, b.height]),
  overflow: root.scrollWidth - root.clientWidth,
  tables: document.querySelectorAll('table').length,
  loaded: performance.getEntriesByType('resource').length,
});
</script>
"""


@pytest.fixture(scope="session")
def browser() -> str:
    """A Chromium of the machine; a Debian without one gets it, as it gets a compiler for the kernels."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    if sys.platform == "linux" and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=False, capture_output=True)
        if found := shutil.which("chromium"):
            return found
    pytest.fail("this test needs Chromium: install it, or Google Chrome", pytrace=False)


def look(browser: str, folder: Path, dark: bool, width: int) -> dict[str, Any]:
    """What the browser makes of the page."""
    path = folder / "report.html"
    path.write_text(page([made_result(), made_result()]).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    flags = [*QUIET, f"--window-size={width},1500", f"--user-data-dir={folder / 'profile'}"]
    flags += ["--force-dark-mode"] * dark
    command = [browser, *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r'<pre id="facts">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(unescape(found[1]))
    return facts


def contrast(one: str, other: str) -> float:
    """Contrast of two colours as CSS computes them, from 1 to 21. Source: WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500], ids=["wide", "narrow"])
def test_report_is_readable_and_loads_nothing(browser: str, tmp_path: Path, dark: bool, width: int) -> None:
    facts = look(browser, tmp_path, dark, width)
    assert facts["dark"] is dark
    assert contrast(facts["ink"], facts["ground"]) >= 2 * READABLE
    assert min(contrast(colour, facts["ground"]) for colour in facts["soft"]) >= READABLE
    assert len(facts["labels"]) > 50
    assert set(facts["labels"]) == {facts["ink"]}  # the plots take the page's colour
    assert len(facts["plots"]) == 12
    assert all(width_ > 200 and height > 80 for width_, height in facts["plots"])
    assert facts["overflow"] <= 0
    assert facts["tables"] == 6
    assert facts["loaded"] == 0
