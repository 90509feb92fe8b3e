"""Draw how acceptance falls with the slot, v1 against DFlash-2, from ../pocket/figures.json to ../pocket/decay.svg.

Command: python decay.py
"""

import argparse
import json
import os

import matplotlib
from target import HERE

NAMES = {"drafter": "v1", "drafter2": "DFlash-2"}
COLOURS = {"drafter": "#c2571a", "drafter2": "#1f5fa8"}
LENGTH = "15"


def draw(axes, figures, kind):
    """One panel: the share of rounds in which the drafts up to each slot were all accepted."""
    for drafter, name in NAMES.items():
        rounds = figures[f"acceptance_{drafter}"][kind]["greedy"]["full"][LENGTH]
        for part, style in (("all", "-"), ("not_looping", "--")):
            shares = rounds[part]["by_position"]
            label = f"{name}, {'all text' if part == 'all' else 'text that does not loop'}"
            axes.plot(range(1, len(shares) + 1), shares, style, color=COLOURS[drafter], label=label, linewidth=1.6)
    axes.set(title=f"{kind} prompts", xlabel="slot", xlim=(1, int(LENGTH)), ylim=(0, 1))
    axes.grid(alpha=0.3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    args = parser.parse_args()
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "decay"  # the same file from the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    with open(os.path.join(args.out, "figures.json")) as file:
        figures = json.load(file)
    drawing, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, kind in zip(panels, ("code", "chat"), strict=True):
        draw(axes, figures, kind)
    panels[0].set_ylabel("share of rounds accepted so far")
    panels[1].legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(os.path.join(args.out, "decay.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
