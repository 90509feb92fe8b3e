"""The Metal kernels' launchers, each beside its twin in stock MLX operations. None serves yet: see docs/kernels.md."""
