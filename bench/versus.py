"""Runs this project, mlx-lm and mlx-vlm on the same small pair, in turn, and compares what a round costs.

Each engine lives in a process of its own, so that none pays for another's memory; one round of measurements asks them
one after the other, in the order of a Latin square. All are given the same checkpoint, the same token ids and the same
draft length, decode greedily, and must give the same tokens.

  host s/round    CPU time of the main thread: building the graph, submitting it, reading, bookkeeping
  build ms/round  the part of it outside MLX's evaluation: Python, and MLX's functions that make the graph's nodes
  launches/round  operations in the graphs that are handed to MLX that are no views
  waits/round     times that the host waits for the device
  peak MB         MLX's peak memory of a generation, weights included

A Mac runs each of MLX's fast operations (norm, RoPE, attention) as one node; a CPU gets a dozen nodes in its place. So
that building and launches are those of a Mac, they are taken in further processes where a stand-in of one node takes
the place of each. What is generated there means nothing, and every round drafts as many tokens as elsewhere.

With --narrow the pair keeps its layers and heads and an eighth of its widths and vocabulary: its text means nothing,
nothing is accepted but by chance, and computing hardly counts beside the host's work.

Usage: pip install . mlx-vlm==0.7.10; python bench/versus.py [--dtype float32] [--tokens 128] [--repeats 4] [--narrow]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

PROMPTS = ("def read_lines(path):\n", "class TestQueue(unittest.TestCase):\n", "import os\nimport sys\n\n\ndef main(")
STAND_INS = " with stand-ins"
ENGINES = ("dflash-mlx", "dflash-mlx plain", "mlx-lm plain", "mlx-vlm DFlash", "mlx-vlm plain")
FIGURES = ("tokens/s", "rounds/s", "host s/round", "build ms/round", "launches/round", "waits/round", "peak MB")
DIGITS = {"host s/round": 5, "build ms/round": 2}
EVALUATE, READ = ("eval", "async_eval", "synchronize"), ("item", "tolist")
VIEWS = ("Broadcast", "Transpose", "Unflatten", "Flatten", "ExpandDims", "Squeeze", "Slice", "Reshape", "AsStrided")
NARROW = 8
NODE = re.compile(r'label ="([^"]*)", shape=rectangle')


class Around:
    """Stands around MLX's functions that evaluate, while it is active and in this process alone."""

    def __enter__(self) -> Self:
        import mlx.core as mx

        self._kept = [(mx, name, getattr(mx, name)) for name in EVALUATE]
        self._kept += [(mx.array, name, getattr(mx.array, name)) for name in READ]
        for owner, name, function in self._kept:
            setattr(owner, name, self._around(function, name))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._kept:
            setattr(owner, name, function)

    def _around(self, function: Any, name: str) -> Any:
        def call(*arguments: Any, **rest: Any) -> Any:
            return self.evaluate(lambda: function(*arguments, **rest), arguments, name != "async_eval")

        return call

    def evaluate(self, call: Any, arrays: Any, waits: bool) -> Any:
        raise NotImplementedError


class Counter(Around):
    """Counts launches and waits."""

    def __init__(self) -> None:
        self.launches = self.waits = 0
        self._pending = False  # something was submitted that nobody has waited for

    def evaluate(self, call: Any, arrays: Any, waits: bool) -> Any:
        """Count what is handed over; reading what was waited for already is no wait."""
        found = launches(arrays)
        self.launches += found
        self._pending |= found > 0
        if waits and self._pending:
            self.waits += 1
            self._pending = False
        return call()


class Evaluation(Around):
    """Adds up the CPU seconds of this thread inside MLX's evaluation."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def evaluate(self, call: Any, arrays: Any, waits: bool) -> Any:
        begun, result = time.thread_time(), call()
        self.seconds += time.thread_time() - begun
        return result


def stand_in() -> None:
    """Put one node in the place of each fast operation, from now on; its numbers stay small and mean nothing.

    In a compiled function it is a softmax, which is not joined with its neighbours; elsewhere it waits for all inputs.
    """
    import mlx.core as mx

    compile_, tracing = mx.compile, []

    def compiled(function: Any, *arguments: Any, **rest: Any) -> Any:
        def traced(*inputs: Any, **others: Any) -> Any:
            tracing.append(function)
            result = function(*inputs, **others)
            tracing.pop()
            return result

        return compile_(traced, *arguments, **rest)

    def norm(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
        return mx.softmax(x, axis=-1) if weight is None or tracing else mx.depends(x, [weight])

    def attention(queries: Any, keys: Any, values: Any, *, mask: Any = None, **_: Any) -> Any:
        return mx.depends(queries, [keys, values, *([mask] if isinstance(mask, mx.array) else [])])

    mx.compile = compiled
    mx.fast.rms_norm = mx.fast.layer_norm = norm
    mx.fast.rope = lambda x, *_, **__: mx.softmax(x, axis=-1)
    mx.fast.scaled_dot_product_attention = attention


def launches(arrays: Any) -> int:
    """Operations below some arrays that are not evaluated yet and are no views."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    flat = [leaf for _, leaf in tree_flatten(list(arrays)) if isinstance(leaf, mx.array)]
    if not flat:
        return 0
    text = io.StringIO()
    mx.export_to_dot(text, *flat)
    return sum(name not in VIEWS for name in NODE.findall(text.getvalue()))


class Ours:
    """This project; `length` 0 decodes plainly, without a drafter."""

    def __init__(self, target: Path, drafter: Path | None):
        from dflash_mlx import load

        # As the others' steps are called here: tokens alone, without their text, and none of them is an end.
        self.pair = replace(load(target, drafter), tokenizer=None, eos_token_ids=frozenset())

    def tokens(self, prompt: list[int], count: int, length: int) -> tuple[list[int], int]:
        """The generated ids, and how many rounds they took."""
        from dflash_mlx import generate

        done = generate(self.pair, prompt, max_tokens=count, draft_length=length if self.pair.drafter else 0)
        return done.tokens, len(done.stats.rounds)


class MlxLm:
    """mlx-lm's own generation step, plain."""

    def __init__(self, target: Path, drafter: Path | None):
        from mlx_lm.utils import load_model

        self.model, self.config = load_model(target)

    def tokens(self, prompt: list[int], count: int, length: int) -> tuple[list[int], int]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        found = [int(token) for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=count)]
        return found, len(found) - 1


class MlxVlm:
    """mlx-vlm's generation step, plain or with its DFlash loop."""

    def __init__(self, target: Path, drafter: Path | None):
        from mlx_vlm.speculative.drafters import load_drafter
        from mlx_vlm.utils import load_model

        self.model = load_model(target)
        self.drafter, self.kind = load_drafter(str(drafter)) if drafter else (None, None)
        if self.drafter is not None:
            self.drafter.prefer_requested_block_size = True  # else it drafts fewer than asked where few are accepted

    def tokens(self, prompt: list[int], count: int, length: int) -> tuple[list[int], int]:
        import mlx.core as mx
        from mlx_vlm.generate.ar import generate_step

        drafting: dict[str, Any] = {}
        if self.drafter is not None:
            drafting = {"draft_model": self.drafter, "draft_kind": self.kind, "draft_block_size": length + 1}
        step = generate_step(mx.array([prompt]), self.model, None, None, max_tokens=count, temperature=0.0, **drafting)
        found = [int(token) for token, _ in step]
        rounds = len(self.drafter.accept_lens) if self.drafter is not None else len(found) - 1  # of this run alone
        return found, rounds


def worker(engine: str, folder: Path) -> None:
    """Answer requests, one JSON line each, with the figures of one generation."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    answers, sys.stdout = sys.stdout, sys.stderr  # what an engine prints is not an answer
    if engine.endswith(STAND_INS):
        engine = engine.removesuffix(STAND_INS)
        stand_in()
    kinds = {"dflash-mlx": Ours, "mlx-lm": MlxLm, "mlx-vlm": MlxVlm}
    runner = kinds[engine.split()[0]](folder / "target", None if engine.endswith("plain") else folder / "drafter")
    for line in sys.stdin:
        asked = json.loads(line)
        mx.clear_cache()
        mx.reset_peak_memory()
        counter, evaluation = Counter(), Evaluation()
        with {"count": counter, "build": evaluation}.get(asked["kind"], contextlib.nullcontext()):
            begun, cpu = time.perf_counter(), time.thread_time()
            found, rounds = runner.tokens(asked["prompt"], asked["tokens"], asked["length"])
            seconds, host = time.perf_counter() - begun, time.thread_time() - cpu
        answer = {"found": found, "rounds": rounds, "seconds": seconds, "host": host, "peak": mx.get_peak_memory()}
        answer |= {"launches": counter.launches, "waits": counter.waits, "build": host - evaluation.seconds}
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """A worker process and the questions to it."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, __file__, "--worker", name, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompt: list[int], tokens: int, length: int, kind: str = "time") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"prompt": prompt, "tokens": tokens, "length": length, "kind": kind}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args[3]} ended; what it said stands above")  # type: ignore[index]
        return dict(json.loads(answer))


def narrowed(key: str, weight: Any) -> Any:
    """The leading eighth of each axis but those of the heads; the others are multiples of 256."""
    heads = 0 if re.search(r"self_attn\.(q|gate)_proj", key) else 1 if "o_proj" in key else None
    kept = [size if axis == heads or size % 256 else size // NARROW for axis, size in enumerate(weight.shape)]
    return weight[tuple(slice(size) for size in kept)]


def write_pair(folder: Path, dtype: str, narrow: bool) -> None:
    """The pocket pair in one type, as all engines read it: mlx-vlm wants the target in the drafter's config."""
    import mlx.core as mx

    from dflash_mlx.resources import find

    pocket, configs = find("models/pocket"), {}
    for name in ("target", "drafter"):
        shutil.copytree(pocket / name, folder / name)
        path = folder / name / "model.safetensors"
        weights = {key: value.astype(getattr(mx, dtype)) for key, value in mx.load(str(path)).items()}
        weights = {key: mx.contiguous(narrowed(key, value)) for key, value in weights.items()} if narrow else weights
        mx.eval(weights)
        mx.save_safetensors(str(path), weights, {"format": "pt"})
        configs[name] = json.loads((folder / name / "config.json").read_text())
    text, drafter = configs["target"]["text_config"], configs["drafter"]
    for config in (text, drafter) if narrow else ():
        config |= {
            key: config[key] // NARROW for key in ("hidden_size", "intermediate_size", "vocab_size") if key in config
        }
    drafter |= {"num_target_layers": text["num_hidden_layers"], "vocab_size": text["vocab_size"], "dtype": dtype}
    for name, config in configs.items():
        (folder / name / "config.json").write_text(json.dumps(config))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of all figures by engine."""
    from dflash_mlx import load
    from dflash_mlx.bench.order import orders
    from dflash_mlx.text import encode

    tokenizer = load("pocket", None).tokenizer
    vocab = json.loads((folder / "drafter/config.json").read_text())["vocab_size"]
    prompts = [[token % vocab for token in encode(tokenizer, text)] for text in PROMPTS]
    engines = {name: Engine(name, folder) for name in (*ENGINES, *(name + STAND_INS for name in ENGINES))}
    tokens, length = arguments.tokens, arguments.draft_length
    for engine in engines.values():
        engine.ask(prompts[0], 16, length)  # warm-up
    figures: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in ENGINES}

    def rounds_of(name: str, prompt: list[int], kind: str) -> tuple[dict[str, Any], dict[str, float]]:
        """A generation, and what each of its rounds took: what the prompt and the first token took is left out."""
        first, done = (engines[name].ask(prompt, count, length, kind) for count in (1, tokens))
        keys = ("seconds", "host", "build", "launches", "waits")
        return done, {key: (done[key] - first[key]) / max(1, done["rounds"]) for key in keys}

    for prompt in prompts:
        truth = engines["dflash-mlx plain"].ask(prompt, tokens, length)["found"]
        for name in ENGINES:
            same = "the same" if engines[name].ask(prompt, tokens, length)["found"] == truth else "OTHER"
            print(f"{name}: {same} tokens as plain decoding here", file=sys.stderr)
            _, each = rounds_of(name + STAND_INS, prompt, "count")
            figures[name]["launches/round"].append(each["launches"])
            figures[name]["waits/round"].append(each["waits"])
        for order in orders(list(ENGINES), arguments.repeats):
            for name in order:
                done, each = rounds_of(name, prompt, "time")
                figures[name]["rounds/s"].append(1 / each["seconds"])
                figures[name]["tokens/s"].append((len(done["found"]) - 1) / done["rounds"] / each["seconds"])
                figures[name]["host s/round"].append(each["host"])
                figures[name]["peak MB"].append(done["peak"] / 1e6)
                figures[name]["build ms/round"].append(1e3 * rounds_of(name + STAND_INS, prompt, "build")[1]["build"])
    return {name: {figure: median(values) for figure, values in rows.items()} for name, rows in figures.items()}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--narrow", action="store_true", help="an eighth of the widths: what is left is host time")
    parser.add_argument("--out", type=Path, help="write the medians as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), arguments.dtype, arguments.narrow)
        found = measure(Path(name), arguments)
    print("| engine | " + " | ".join(FIGURES) + " |\n|" + "---|" * (len(FIGURES) + 1))
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(f"{row[figure]:.{DIGITS.get(figure, 1)}f}" for figure in FIGURES) + " |")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
