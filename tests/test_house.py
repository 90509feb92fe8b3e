"""The rules of the house, read from the tree itself: sizes, docstrings, and what must not stand in a file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION, USUAL_FUNCTION = 350, 80, 40
USUAL_SHARE, DOCUMENTED_SHARE = 0.90, 0.85
TEXT = {".py", ".md", ".toml", ".json", ".metal", ".h", ".cpp", ".sh", ".yml", ".txt", ".jinja", ""}
# Written in halves, so that this file does not find itself.
FORBIDDEN = [
    ("a machine's path", re.compile(r"(?<![\w.])/(wo" r"rk|ro" r"ot|Use" r"rs|ho" r"me|tm" r"p/lab)/[\w.]")),
    ("a registry's host", re.compile(r"py" r"pi\.org|pythonho" r"sted|npm" r"js\.|deb\.deb" r"ian\.org")),
    ("a registry's address", re.compile(r"index" r"-url|index" r"_url")),
]


@cache
def tracked() -> tuple[Path, ...]:
    """List the files of the project, as git knows them; without git, all but what builds leave behind."""
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in run.stdout.split("\0") if name]
    if run.returncode != 0 or not names:
        hidden = re.compile(r"(^|/)(\.(?!ci|gitignore)|build/|dist/|__pycache__)")
        found = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*"))
        names = [name for name in found if not hidden.search(name)]
    return tuple(path for name in names if (path := ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """List tracked Python files, of the given top folders or of all."""
    files = [path for path in tracked() if path.suffix == ".py"]
    return [path for path in files if not folders or path.relative_to(ROOT).parts[0] in folders]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Walk over all functions of a file, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function without its docstring, which may be as long as it needs."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def public_parts(tree: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    """Walk over public functions and classes, and the public methods of public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_parts(node)


def test_the_tree_is_found() -> None:
    assert ROOT / "pyproject.toml" in tracked()
    assert len(python_files("dflash_mlx")) > 10


def test_files_are_short() -> None:
    long = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in long.items() if lines > MAX_FILE} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length(node)
        for path in python_files()
        for node in functions(path)
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FUNCTION} == {}
    usual = sum(lines <= USUAL_FUNCTION for lines in sizes.values())
    assert usual >= USUAL_SHARE * len(sizes)


def test_every_module_says_what_it_is() -> None:
    bare = [path.relative_to(ROOT) for path in python_files() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert bare == []


def test_public_functions_and_classes_have_docstrings() -> None:
    parts = [
        (f"{path.relative_to(ROOT)}: {node.name}", bool(ast.get_docstring(node)))
        for path in python_files("dflash_mlx")
        for node in public_parts(ast.parse(path.read_text()))
    ]
    bare = [name for name, documented in parts if not documented]
    assert len(bare) <= (1 - DOCUMENTED_SHARE) * len(parts), bare


def test_the_package_reads_no_environment_variables() -> None:
    reads = re.compile(r"\benviron\b|\bgetenv\b")
    assert [path.relative_to(ROOT) for path in python_files("dflash_mlx") if reads.search(path.read_text())] == []


@pytest.mark.parametrize(("what", "pattern"), FORBIDDEN, ids=[what for what, _ in FORBIDDEN])
def test_no_file_holds(what: str, pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked()
        if path.suffix in TEXT and path.stat().st_size < 1_000_000
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == [], what


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by name alone, and would refuse to collect the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
