"""From a folder or a hub id to checked models: files -> names -> shapes -> modules, weights last."""

from .build import load_drafter, load_target

__all__ = ["load_drafter", "load_target"]
