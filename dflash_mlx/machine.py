"""What this machine is: its system, chip, memory and GPU cores, for reports and for what is stored per machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Give system, chip, GPU cores, memory in bytes, and the device that MLX takes; `None` where unknown."""
    import mlx.core as mx

    return {
        "system": system(),
        "chip": chip(),
        "gpu_cores": gpu_cores(),
        "memory_bytes": memory_bytes(),
        "device": mx.default_device().type.name,
    }


def system() -> str:
    """Name the operating system with its version."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    return f"{name} {platform.machine()}"


def chip() -> str:
    """Name the chip as its maker does."""
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string").strip() or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def memory_bytes() -> int | None:
    """Give the machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def gpu_cores() -> int | None:
    """Count the cores of a Mac's GPU; `None` elsewhere."""
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', output_of("ioreg", "-rc", "AGXAccelerator", "-d", "1"))
    return int(found[1]) if found else None


def output_of(*command: str, seconds: float = 10) -> str:
    """Give what a program of the system prints; nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
