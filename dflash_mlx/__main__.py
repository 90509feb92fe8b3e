"""``python -m dflash_mlx``: the same as the command ``dflash-mlx``."""

from .cli import main

if __name__ == "__main__":
    main()
