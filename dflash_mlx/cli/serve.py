"""``dflash-mlx serve``: the OpenAI API on this machine."""

from __future__ import annotations

from typing import Any

import click

from ..errors import DFlashError, must
from ..server.hosts import is_loopback
from .render import note
from .shared import (
    Seconds,
    Size,
    generation_flags,
    generation_options,
    load_arguments,
    load_pair,
    model_flags,
    say_which,
)

EXAMPLES = """\b
Examples:
  dflash-mlx serve
  dflash-mlx serve --model ./target-4bit --draft ./drafter --port 8080
  dflash-mlx serve --host 0.0.0.0 --api-key SECRET
"""
EXTRA = ("starlette", "uvicorn", "llguidance")


@click.command(epilog=EXAMPLES, short_help="Serve the OpenAI API on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; another needs --api-key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", metavar="KEY", help="What requests have to show as Authorization: Bearer KEY.")
@click.option("--name", metavar="NAME", help="The model's name for clients. Without it, the pair's own.")
@click.option("--cors-origin", multiple=True, metavar="ORIGIN", help="A web page's origin that may ask.")
@click.option("--max-streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Requests at once.")
@click.option("--max-queue", type=click.IntRange(0), default=64, show_default=True, help="Requests that may wait.")
@click.option("--cache-memory", type=Size(), metavar="SIZE",
              help="Memory for the histories of earlier requests. Without it, a quarter of what is free.")  # fmt: skip
@click.option("--max-body", type=Size(), default="32MiB", show_default=True, help="Largest request.")
@click.option("--shutdown-seconds", type=Seconds(), default=20.0, show_default=True,
              help="Time that requests have to finish after SIGTERM.")  # fmt: skip
@model_flags
@generation_flags
@click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors.")
def serve(
    host: str, port: int, api_key: str | None, name: str | None, cors_origin: tuple[str, ...], max_streams: int,
    max_queue: int, cache_memory: int | None, max_body: int, shutdown_seconds: float, quiet: bool, **flags: Any,
) -> None:  # fmt: skip
    """Serve the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    The flags of a generation are the defaults of requests that do not name them. Ctrl-C and SIGTERM let requests
    finish, for a while.
    """
    arguments = load_arguments(flags)
    options = generation_options(flags)
    _check_extra()
    if api_key == "" or (api_key is None and not is_loopback(host)):
        raise click.UsageError(f"--api-key is needed to listen at {host}: others can reach that address.")
    from ..server.run import address, listen, run_server

    say_which(flags, quiet)
    with listen(host, port) as listening:  # before a model is loaded: an address in use is told at once
        pair = load_pair(arguments, quiet)
        from ..engine import Engine
        from ..prefix_store import PrefixStore
        from ..server.app import Api, Limits
        from ..server.worker import Service

        room = max(0, pair.plan.limit - pair.plan.shared_bytes)
        kept = min(room // 4 if cache_memory is None else cache_memory, room)
        store = PrefixStore(pair, kept)
        with Engine(pair, max_streams=max_streams, max_queue=max_queue, store=store, kept_bytes=kept) as engine:
            service = Service(engine, name or pair.name, options, store)
            app = Api(service, Limits(api_key, max_body, cors_origin)).app()
            note(f"Serving {service.name} at {address(listening)}/v1", quiet)
            run_server(app, service, listening, shutdown_seconds)


def _check_extra() -> None:
    """The extra is installed."""
    from importlib.util import find_spec

    missing = [module for module in EXTRA if find_spec(module) is None]
    if missing:
        todo = "Install it: pip install '.[serve]' from a checkout."
        raise DFlashError(must("serve", "the extra [serve]", "installed", f"no {', '.join(missing)}", todo))
