"""``dflash-mlx doctor --kernels``: qualify the kernels on this machine, as a file that a user can send."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from ..machine import machine_facts
from ..resources import DISTRIBUTION, find, version
from ..toml_files import read_toml

if TYPE_CHECKING:
    from ..kernels.places import Place

Report = dict[str, Any]
TODO = "Stock operations serve there. Please send the output of: dflash-mlx doctor --kernels --json"


def examine_kernels(model: str | None, draft: str | None) -> Report:
    """Qualify all kernels anew; plain data, ready for JSON.

    Args:
        model: the target whose shapes are tried; without it those of the pocket pair and of the 30B pair.
        draft: its drafter; without it the one that is known.
    """
    from ..kernels.choose import device_here, verdicts_for
    from ..kernels.verdicts import Verdicts, facts
    from ..pair import AUTO, places_of

    device, why_not = device_here()
    pairs = {"pocket": places_of("pocket"), "30B": published_places()}
    if model is not None:
        pairs = {model: places_of(model, draft or AUTO)}
    report: Report = {
        "versions": {"python": platform.python_version(), DISTRIBUTION: version(), "mlx": facts()["mlx"]},
        "machine": machine_facts(),
        "sources": facts()["sources"],
        "not_run": why_not,
        "stored_in": str(Verdicts().path) if device else None,
        "verdicts": {},
        "problems": [],
    }
    for name, places in pairs.items() if device else ():
        verdicts, notes = verdicts_for(places, device, anew=True)
        report["verdicts"][name] = [verdict.as_data() for verdict in verdicts]
        report["problems"] += [{"what": f"{name}: {note}", "do": TODO} for note in notes]
    return report


def published_places() -> list[Place]:
    """The places of the 30B pair in bfloat16, its drafter in 4 bits, from its published config."""
    import mlx.core as mx

    from ..config import TargetConfig
    from ..drafter_config import DrafterConfig
    from ..kernels.places import drafter_places, target_places
    from ..loading.quantisation import Quantisation

    raw, four = read_toml(find("bench/muse_glimmer_30b.toml")), Quantisation(64, 4)
    quantised = {"encoder.fc": four, "layers.0.self_attn.k_proj": four}
    target, drafter = TargetConfig.from_dict(raw["target"]), DrafterConfig.from_dict(raw["drafter"])
    return [*target_places(target, mx.bfloat16), *drafter_places(drafter, mx.bfloat16, quantised)]


def as_text(report: Report) -> str:
    """Write the report for people: a line per place, and its times."""
    lines = ["machine", *(f"  {name:<20} {value}" for name, value in (report["versions"] | report["machine"]).items())]
    if report["not_run"]:
        return "\n".join([*lines, "", f"No kernel was tried: {report['not_run']}. Stock operations serve."])
    for name, verdicts in report["verdicts"].items():
        lines += ["", name]
        for verdict in verdicts:
            first, last = verdict["rows"]
            served = f"metal for {first} to {last} rows" if first <= last else f"stock: {verdict['why']}"
            lines.append(f"  {verdict['place']['name']} ({verdict['place']['dtype']}): {served}")
            lines += [f"    {_time(entry)}" for entry in verdict["times"]]
    return "\n".join([*lines, "", *(problem["what"] for problem in report["problems"])]).rstrip()


def _time(entry: dict[str, Any]) -> str:
    """One pair of times, of one call each."""
    kernel, stock = entry["kernel_s"] * 1e6, entry["stock_s"] * 1e6
    return f"{entry['rows']:>2} rows at position {entry['context']}: kernel {kernel:.0f} µs, stock {stock:.0f} µs"
