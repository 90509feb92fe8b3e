"""The text the pocket pair learns from: the standard library of the CPython that runs this file.

Reads the .py files of the running interpreter, leaves out tables and repeated text, splits whole files
into train and held-out before anything is learned, and adds a few chat documents made from the same code.
Writes train.json, chat.json and held.json (lists of texts) into the work folder.

Command: python corpus.py --work WORK
"""

import argparse
import ast
import json
import os
import random
import re
import sysconfig
import zlib
from collections import Counter

SEED = 20
HELD_SHARE = 0.04
GROUP_CAP = 450_000  # bytes of one package or test folder at most, so that none dominates
LEFT_OUT = {"site-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__", "lib-dynload"}
CHUNK, SHINGLE = 12, 3  # lines; near-duplicates are found by shingles of stripped lines
CHAT_DOCUMENTS = 1200
TABLE_LINE = re.compile(r"^[\s\d,.xXa-fA-F()\[\]{}'\"\\+\-*/:;|]{24,}$")


def read_files():
    """Return [(relative path, text)] of the standard library, sorted, tables and oddities left out."""
    root, found = sysconfig.get_paths()["stdlib"], []
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in LEFT_OUT)
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            path = os.path.join(folder, name)
            try:
                with open(path, encoding="utf-8", newline="") as file:
                    text = file.read().replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            lines = text.split("\n")
            tables = sum(1 for line in lines if TABLE_LINE.match(line) and line.strip())
            if text.strip() and "\r" not in text and "\0" not in text and tables < 0.2 * len(lines):
                found.append((os.path.relpath(path, root).replace(os.sep, "/"), text))
    return found


def is_test(path):
    """True for the interpreter's own tests, wherever they live."""
    parts = path.split("/")
    return any(p in ("test", "tests", "idle_test") or p.startswith("test_") for p in parts)


def group(path):
    """The package a file belongs to, for the cap: asyncio, test/test_email, ..."""
    parts = path.split("/")
    return "/".join(parts[:2] if parts[0] == "test" else parts[:1])


def without_tables(text):
    """Drop runs of number lines and lines longer than 240 characters."""
    lines = text.split("\n")
    marks = [bool(TABLE_LINE.match(line)) and bool(line.strip()) for line in lines]
    keep = []
    for i, line in enumerate(lines):
        run = marks[i] and ((i > 0 and marks[i - 1]) or (i + 1 < len(lines) and marks[i + 1]))
        if not run and len(line) <= 240:
            keep.append(line)
    return "\n".join(keep)


def shingles(lines):
    """Hashes of SHINGLE consecutive non-empty stripped lines."""
    bare = [s for s in (line.strip() for line in lines) if len(s) > 3]
    return [zlib.crc32("\n".join(bare[i : i + SHINGLE]).encode()) for i in range(len(bare) - SHINGLE + 1)]


def without_repeats(text, seen, learn):
    """Drop chunks of lines most of whose shingles are in `seen`; add the rest to it if `learn`."""
    lines, keep = text.split("\n"), []
    for start in range(0, len(lines), CHUNK):
        chunk = lines[start : start + CHUNK]
        marks = shingles(chunk)
        if marks and sum(m in seen for m in marks) > 0.4 * len(marks):
            continue
        keep += chunk
        if learn:
            seen.update(marks)
    return "\n".join(keep)


def build(rng):
    """Return (train, held): lists of {"path", "kind", "text"}; no held-out chunk repeats a train chunk."""
    files = read_files()
    rng.shuffle(files)
    quota, sides = Counter(), {"train": [], "held": []}
    held_left = {
        kind: HELD_SHARE * sum(is_test(p) == (kind == "test") for p, _ in files) for kind in ("test", "library")
    }
    for path, text in files:
        kind = "test" if is_test(path) else "library"
        side = "train"
        if held_left[kind] >= 1 and 2_000 < len(text) < 120_000:
            held_left[kind] -= 1
            side = "held"
        if side == "train" and quota[group(path)] + len(text) > GROUP_CAP and quota[group(path)]:
            continue
        quota[group(path)] += len(text) if side == "train" else 0
        sides[side].append({"path": path, "kind": kind, "text": without_tables(text)})
    seen = set()
    for side, learn in (("train", True), ("held", False)):
        for item in sides[side]:
            item["text"] = without_repeats(item["text"], seen, learn)
        sides[side] = [item for item in sides[side] if len(item["text"]) > 300]
    return sides["train"], sides["held"]


def functions(item):
    """Yield (name, first docstring line or "", source) of the short top-level functions and methods of a file."""
    try:
        tree = ast.parse(item["text"])
    except (SyntaxError, ValueError):
        return
    lines = item["text"].split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 2 <= node.end_lineno - node.lineno <= 24:
            body = lines[node.lineno - 1 : node.end_lineno]
            body = [line[node.col_offset :] if not line[: node.col_offset].strip() else line for line in body]
            doc = (ast.get_docstring(node) or "").strip().split("\n")[0]
            yield node.name, doc, "\n".join(body)


def turn(head, body, end="<|eot|>"):
    return f"<|start|>{head}<|message|>{body}{end}"


DEFAULT_SYSTEM = "You are a helpful AI assistant.\nKnowledge cutoff: 2026-01-04."
READ_TOOL = {
    "name": "source.read",
    "description": "Return the source of a function.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


def tool_section(tools):
    """The tools part of a system turn; chat_template.jinja renders the same text."""
    spaces = list(dict.fromkeys(tool["name"].split(".")[0] for tool in tools))
    meta = "\n".join(json.dumps({"name": name, "description": ""}) for name in spaces)
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return (
        "# Tools\nCall a tool by a message to it that holds one block of this form:\n"
        '<atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="KEY">VALUE</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>\n"
        f"Strings are written as they are, other values as JSON.\n// Tool metadata\n{meta}\n"
        f"// Function schemas\n{schemas}\n"
        "Example: to ask tool box.open for item 3, write to box.open:\n<atem:function_calls>\n"
        '<atem:invoke name="box.open">\n<atem:parameter name="item">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ), spaces


def system_turn(text, strength, tools=()):
    section, spaces = tool_section(tools) if tools else ("", [])
    names = ", ".join(f'"{name}"' for name in ["self", *(f"{s}.*" for s in spaces), "user"])
    middle = f"\n\n{section}" if tools else ""
    return turn("system", f"{text}\n\nReasoning strength: {strength}.{middle}\n\n# Valid recipients: {names}.")


def chat_document(rng, name, doc, source):
    """One conversation about one function, in the layout of the chat template."""
    ask = rng.choice([f"Write {name}", f"Write a function {name}.", doc or f"Write {name}", f"def {name}"])
    if doc and rng.random() < 0.3:
        ask = f"Write {name}: {doc}"
    strength = rng.choice(["low", "medium", "high", "high", "high", "xhigh"])
    kind = rng.random()
    out = "<|begin_of_text|>"
    if kind < 0.15:
        call = (
            '<atem:function_calls>\n<atem:invoke name="source.read">\n'
            f'<atem:parameter name="name">{name}</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>"
        )
        out += system_turn(DEFAULT_SYSTEM, strength, [READ_TOOL])
        out += turn("user", rng.choice([f"Show {name}", f"Read {name}", f"What is in {name}?"]))
        out += turn("assistant to=source.read", call)
        out += turn("tool source.read", f'<tool_output name="source.read">\n{source}\n</tool_output>')
        return out + turn("assistant to=user", doc or source) + "<|end_of_text|>"
    out += system_turn(DEFAULT_SYSTEM if rng.random() < 0.8 else "You write Python.", strength)
    out += turn("user", ask)
    if kind < 0.45 and doc:
        out += turn("assistant to=self", f"The function {name}: {doc}", "<|eom|>")
    return out + turn("assistant to=user", source) + "<|end_of_text|>"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    work = parser.parse_args().work
    os.makedirs(work, exist_ok=True)
    rng = random.Random(SEED)
    train, held = build(rng)
    parts = {"train": train, "held": held}
    for side, count in (("train", CHAT_DOCUMENTS), ("held", 120)):
        pool = [f for item in parts[side] for f in functions(item)]
        rng.shuffle(pool)
        parts[f"chat_{side}"] = [{"path": "", "kind": "chat", "text": chat_document(rng, *f)} for f in pool[:count]]
    for name, items in parts.items():
        with open(os.path.join(work, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(items, file)
        sizes = Counter()
        for item in items:
            sizes[item["kind"]] += len(item["text"].encode())
        print(name, len(items), "documents, bytes:", dict(sizes))


if __name__ == "__main__":
    main()
