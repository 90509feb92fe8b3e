"""`dflash-mlx bench report`: one page that needs nothing else, and the figures of the results on it."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_result import made_result

from dflash_mlx.bench.result import validate, write_result
from dflash_mlx.cli import cli
from dflash_mlx.report import write_report
from dflash_mlx.report.page import page
from dflash_mlx.report.published import published_for

OUTSIDE = re.compile(r"""(?:src|href)\s*=|url\(|@import|<script|<link|<iframe""", re.IGNORECASE)


class Cells(HTMLParser):
    """Collects table cells, and checks that what opens closes."""

    VOID = ("meta", "br", "hr", "path", "use")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """Nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def cells_of(text: str) -> list[str]:
    parser = Cells()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.cells


@pytest.fixture(scope="module")
def text() -> str:
    return page([made_result()])


def test_page_refers_to_nothing_outside_itself(text: str) -> None:
    references = [found for found in OUTSIDE.findall(text) if not found.startswith(("href", "url("))]
    assert references == []
    targets = re.findall(r"""(?:xlink:href|href)="([^"]*)"|url\(([^)]*)\)""", text)
    assert all((one or other).startswith("#") for one, other in targets)


def test_page_shows_the_medians_of_the_records(text: str) -> None:
    cells = cells_of(text)
    assert "20.0 (10.0 to 30.0)" in cells  # plain: 10, 20, 30 tokens per second
    assert "40.0 (20.0 to 60.0)" in cells  # drafted: twice as much each time
    assert "2.00" in cells
    assert "3 of 3" in cells


def test_page_names_the_conditions(text: str) -> None:
    cells = cells_of(text)
    for expected in ("Apple M4 Max, 40 GPU cores", "128 GiB", "battery 83 %", "72 %", "low"):
        assert expected in cells


def test_page_shows_published_figures_for_this_chip_only_and_their_sources(text: str) -> None:
    rows = published_for("Apple M4 Max")
    assert rows
    assert {row["chip"] for row in rows} == {"M4 Max"}
    cells = cells_of(text)
    assert all(row["source"] in cells for row in rows)
    assert published_for("A chip of another maker") == []


def test_page_has_the_plots(text: str) -> None:
    assert text.count("<svg") == 6
    assert "currentColor" in text


def test_page_escapes_what_a_result_says() -> None:
    result = made_result()
    result["manifest"]["target"]["name"] = "<script>alert(1)</script>"
    assert "<script>" not in page([result])


def test_page_of_the_same_results_is_the_same_file(text: str) -> None:
    assert page([made_result()]) == text


def test_report_takes_any_number_of_results(tmp_path: Path) -> None:
    other = made_result()
    other["manifest"]["machine"]["chip"] = "Apple M1"
    html, markdown = write_report([made_result(), other, made_result()], tmp_path / "new")
    assert html.read_text().count("<section>") == 3
    assert "## 2. Apple M1, org/Target-4bit" in markdown.read_text()


def test_report_of_a_run_without_drafts_leaves_out_what_has_no_figures() -> None:
    result = made_result()
    result["records"] = [record for record in result["records"] if record["mode"] == "plain"]
    assert page([result]).count("<svg") == 4  # no acceptance by position, no draft lengths


def test_report_refuses_a_file_that_is_no_result(tmp_path: Path) -> None:
    wrong = copy.deepcopy(made_result())
    del wrong["manifest"]["machine"]
    write_result(wrong, tmp_path / "wrong.json")
    done = CliRunner().invoke(cli, ["bench", "report", str(tmp_path / "wrong.json"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "'machine' is a required property" in done.output
    assert not (tmp_path / "out").exists()


def test_the_made_result_is_one_that_bench_could_have_written() -> None:
    validate(made_result(), "the tests' result")
