"""``python -m dflash_mlx`` and the command ``dflash-mlx``: Ctrl-C ends it without a traceback from its first moment.

Imports come after the handler: an interrupt in the middle of one would be a traceback, or be lost in the import system.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the command line and run it; exit codes as in `dflash_mlx.cli`."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a caller ignores it, or has its own
    if usual:
        signal.signal(signal.SIGINT, _leave)
    from .cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(*_: object) -> None:
    """Nothing has begun that would have to be ended well."""
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
