"""The state of power and heat while a benchmark runs; what a system does not tell is `None`, never a guess."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import DFlashError, must
from ..machine import output_of

SUPPLIES = Path("/sys/class/power_supply")
MILLIWATTS = re.compile(r"^Combined Power.*?:\s*(\d+) mW", re.MULTILINE)
SAMPLE_MS = 500


def power_state() -> dict[str, Any]:
    """Give `source` ("mains", "battery" or None), `battery_percent` and `thermal` (a speed limit in percent)."""
    if sys.platform == "darwin":
        return _mac(output_of("pmset", "-g", "batt"), output_of("pmset", "-g", "therm"))
    return _linux(SUPPLIES)


def _mac(battery: str, thermal: str) -> dict[str, Any]:
    """Read what pmset prints."""
    source = "battery" if "Battery Power" in battery else "mains" if "AC Power" in battery else None
    percent = re.search(r"(\d+)%", battery)
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", thermal)
    unlimited = 100 if "No thermal warning" in thermal else None
    return {
        "source": source,
        "battery_percent": int(percent[1]) if percent else None,
        "thermal": int(limit[1]) if limit else unlimited,
    }


def _linux(supplies: Path) -> dict[str, Any]:
    """Read the kernel's files; a machine without a supply listed says nothing."""

    def read(folder: Path, name: str) -> str:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            return ""

    folders = sorted(supplies.iterdir()) if supplies.is_dir() else []
    batteries = [folder for folder in folders if read(folder, "type") == "Battery"]
    online = [read(folder, "online") == "1" for folder in folders if read(folder, "type") in ("Mains", "USB")]
    charge = read(batteries[0], "capacity") if batteries else ""
    source = None if not folders else "mains" if any(online) else "battery" if batteries else None
    return {"source": source, "battery_percent": int(charge) if charge.isdigit() else None, "thermal": None}


class Energy:
    """Joules between `__enter__` and `__exit__`, from macOS's powermetrics, which only root may run.

    Attributes:
        joules: after the block; `None` where it was not asked for, or too short for a sample.
    """

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._process: subprocess.Popen[str] | None = None
        self.joules: float | None = None

    def __enter__(self) -> Energy:
        if self._wanted:
            command = ["sudo", "-n", "powermetrics", "--samplers", "cpu_power", "-i", str(SAMPLE_MS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            text, _errors = self._process.communicate(timeout=10)
            self.joules = joules(text)


def joules(text: str) -> float | None:
    """Add up the samples in what powermetrics printed: milliwatts times the sample's length."""
    samples = [int(value) for value in MILLIWATTS.findall(text)]
    return sum(samples) * SAMPLE_MS / 1e6 if samples else None


def check_energy() -> None:
    """Refuse `--energy` where powermetrics cannot be run.

    Raises:
        DFlashError: not on a Mac, or sudo asks for a password.
    """
    if sys.platform == "darwin" and output_of("sudo", "-n", "powermetrics", "-n", "1", "-i", "100"):
        return
    todo = "Leave --energy out, or run `sudo -v` first on a Mac."
    raise DFlashError(must("bench", "--energy", "used where powermetrics may be run", "no permission", todo))
