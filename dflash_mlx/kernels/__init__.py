"""The Metal kernels: launchers beside their twins in stock MLX operations, and what serves: see docs/kernels.md."""
