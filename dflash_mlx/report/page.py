"""The report as one HTML page that needs nothing else: styles and plots are inside, scripts there are none."""

from __future__ import annotations

from html import escape
from typing import Any

from . import tables
from .markdown import heading
from .plots import plots
from .published import published_for

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #5c6670; --line: #d9dee3; --head: #f3f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa5b0; --line: #343b42; --head: #1d2226 }
}
* { box-sizing: border-box }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 72rem;
  margin: 0 auto; padding: 1.5rem 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-top: 1px solid var(--line); padding-top: 1.2rem }
h3 { font-size: 1rem } figcaption, .soft { color: var(--soft) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.7rem; text-align: left; vertical-align: top }
th { background: var(--head); font-weight: 600 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem }
figure { margin: 0 } svg { color: var(--ink); height: auto }
"""


def page(results: list[dict[str, Any]]) -> str:
    """Write the page for all results, a section for each."""
    body = "".join(_section(number, result) for number, result in enumerate(results, start=1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dflash-mlx: measurements</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        "<h1>dflash-mlx: measurements</h1>\n"
        '<p class="soft">Every figure below was read from a clock on the machine that its section names, unless its '
        f"heading says otherwise.</p>\n{body}</body>\n</html>\n"
    )


def _section(number: int, result: dict[str, Any]) -> str:
    figures = "".join(
        f'<figure role="img" aria-label="{escape(title)}"><figcaption>{escape(title)}</figcaption>{svg}</figure>\n'
        for title, svg in plots(result)
    )
    parts = [
        f"<section>\n<h2>{number}. {escape(heading(result))}</h2>\n",
        _table(tables.summary_of(result)),
        f'<p class="soft">{tables.FOOTNOTE} Medians, with the least and the most in brackets.</p>\n',
        f'<div class="plots">\n{figures}</div>\n',
        f"<h3>Measured under</h3>\n{_table(tables.conditions(result))}",
    ]
    if found := published_for(result["manifest"]["machine"]["chip"]):
        parts += ["<h3>Published by others for this chip (not measured here)</h3>\n", _table(tables.published(found))]
    return "".join(parts) + "</section>\n"


def _table(table: tables.Table) -> str:
    header, rows = table
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
