"""The figure of the demo's curve, drawn from the table of docs/demo.md.

`python -m tools.curve_figure docs` writes `docs/pictures/demo_curve.svg`. Its text is not converted to outlines, and no
font is embedded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

UPDATES = (0, 20, 40, 60, 70)
"""Updates of the columns `before` to `at 70`."""
_ROW = re.compile(r"^\| (\d+) \|((?: \**[\d.]+\** \|){5})", re.MULTILINE)


def curves(page: str) -> dict[int, list[float]]:
    """Return held-out success at each of `UPDATES`, by seed. `page` is the text of docs/demo.md."""
    return {int(seed): [float(one) for one in re.findall(r"[\d.]+", cells)] for seed, cells in _ROW.findall(page)}


def draw(found: dict[int, list[float]], path: Path) -> None:
    """Write the figure of the curves on a light background, which is readable on a dark page too."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "demo", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for seed, values in found.items():
            axes.plot(UPDATES, values, marker="o", markersize=4, label=f"seed {seed}")
        axes.set(xlabel="update", ylabel="held-out success", xticks=UPDATES, ylim=(0.5, 1.0))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    docs = Path(sys.argv[1])
    draw(curves((docs / "demo.md").read_text()), docs / "pictures" / "demo_curve.svg")


if __name__ == "__main__":
    main()
