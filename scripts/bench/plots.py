"""Draw the pictures of README.md here from figures.json, and put newly measured figures into that file.

    python scripts/bench/plots.py [--out FOLDER]    startup.svg, recovery.svg, all_reduce.svg, scaling.svg
    python scripts/bench/startup.py --json | python scripts/bench/plots.py --update startup
    python scripts/bench/recovery.py --json | python scripts/bench/plots.py --update recovery
    python scripts/bench/collectives.py --operations all_reduce --json |
        python scripts/bench/plots.py --update all_reduce
    python scripts/bench/scaling.py --json | python scripts/bench/plots.py --update scaling

--update takes one object a line; objects with the same names (script, workers, command, ranks, ...) take the place of
older ones. Needs matplotlib. The pictures have no background and grey text, for light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "figures.json"
NAMES = {  # what tells one figure of a section from another
    "startup": ("script", "workers", "command"),
    "recovery": ("command",),
    "all_reduce": ("ranks", "nbytes"),
    "scaling": ("ranks",),
}
OURS, SECOND, THEIRS, TEXT, DARK = "#2f81f7", "#3fb950", "#a8a8a8", "#808080", "#5f5f5f"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",  # text that can be searched, and the same bytes with every version of a font
    "svg.hashsalt": "dtrain",
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
}
Rows = list[dict[str, Any]]


def startup(axes: Axes, rows: Rows) -> None:
    cases = list(dict.fromkeys((row["script"], row["workers"]) for row in rows))
    times = {(row["script"], row["workers"], row["command"]): row["wall_s"] for row in rows}
    labels = [script.replace(" + ", "\n+ ") + f",\n{workers} workers" for script, workers in cases]
    groups = [(name, [times[(*case, name)] for case in cases]) for name in ("dtrain", "torchrun")]
    _bars(axes, labels, groups, "{:.2f}")
    axes.set_xlabel("seconds for the whole command")


def recovery(axes: Axes, rows: Rows) -> None:
    titles = {
        "resilient": "dtrain,\n@ddp.resilient",
        "dtrain": "dtrain,\nall start again",
        "torchrun": "torchrun,\nall start again",
    }
    times = {row["command"]: row for row in rows}
    names = [name for name in titles if name in times]
    places = range(len(names) - 1, -1, -1)
    medians = [times[name]["median_s"] for name in names]
    below = [times[name]["median_s"] - times[name]["least_s"] for name in names]
    above = [times[name]["most_s"] - times[name]["median_s"] for name in names]
    colours = [THEIRS if name == "torchrun" else OURS for name in names]
    axes.barh(places, medians, 0.6, xerr=[below, above], color=colours, ecolor=DARK, capsize=3)
    for place, name in zip(places, names, strict=True):
        end = (times[name]["most_s"], place)
        axes.annotate(f"{times[name]['median_s']:.2f}", end, (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [titles[name] for name in names])
    axes.set_xlabel("seconds from the kill of one of two workers until all work again")


def all_reduce(axes: Axes, rows: Rows) -> None:
    sizes = sorted({row["nbytes"] for row in rows})
    ratios = {(row["ranks"], row["nbytes"]): row["ratio"] for row in rows}
    groups = [
        (f"shm, {ranks} ranks", [ratios[ranks, size] for size in sizes])
        for ranks in sorted({row["ranks"] for row in rows})
    ]
    _bars(axes, [_size(size) for size in sizes], groups, "{:.2f}", colours=(OURS, SECOND))
    axes.axvline(1, color=TEXT, linestyle=":")
    axes.annotate("gloo", (1, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center")
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("time of an all-reduce, as a part of gloo's")


def scaling(axes: Axes, rows: Rows) -> None:
    ranks = [row["ranks"] for row in rows]
    network = [100 * row["compute_s"] / (row["step_s"] - row["straggling_s"]) for row in rows]
    axes.plot(ranks, network, "o--", color=SECOND, label="if all ranks were equally fast")
    whole = [100 * row["efficiency"] for row in rows]
    axes.plot(ranks, whole, "o-", color=OURS, label="with the spread of the measured steps")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"ranks, {rows[0]['ranks_per_host']} a host, network of {rows[0]['gbit']:g} Gbit/s a host")
    axes.set_ylabel("efficiency, %")
    axes.grid(color=TEXT, alpha=0.3)
    axes.legend(fontsize="small")


DRAW: dict[str, Callable[[Axes, Rows], None]] = {
    "startup": startup, "recovery": recovery, "all_reduce": all_reduce, "scaling": scaling,
}  # fmt: skip


def draw(figures: dict[str, Rows], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, fill in DRAW.items():
        with rc_context(STYLE):
            figure = Figure(figsize=(7, 3.4), layout="constrained")
            axes = figure.subplots()
            axes.patch.set_alpha(0)
            fill(axes, figures[name])
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


def update(rows: Rows, measured: Iterable[dict[str, Any]], names: tuple[str, ...]) -> Rows:
    """Return the figures of a section with measured ones in the place of older ones, which keep their order."""
    found = {tuple(row[name] for name in names): row for row in rows}
    for row in measured:
        found[tuple(row[name] for name in names)] = row
    return list(found.values())


def _bars(
    axes: Axes,
    labels: list[str],
    groups: list[tuple[str, list[float]]],
    form: str,
    colours: tuple[str, ...] = (OURS, THEIRS),
) -> None:
    height = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups):
        places = [len(labels) - 1 - row + 0.4 - (index + 0.5) * height for row in range(len(labels))]
        bars = axes.barh(places, values, 0.92 * height, color=colours[index], label=name)
        axes.bar_label(bars, [form.format(value) for value in values], padding=4)
    axes.set_yticks(range(len(labels) - 1, -1, -1), labels)
    axes.legend(loc="upper right", bbox_to_anchor=(0.88, 1), fontsize="small")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", choices=NAMES, help="read figures of this section from standard input first")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the pictures [where this script is]")
    args = parser.parse_args()
    figures = json.loads(FIGURES.read_text())
    if args.update:
        measured = [json.loads(line) for line in sys.stdin if line.strip()]
        if not measured:
            sys.exit(f"plots.py --update {args.update}: nothing came on standard input")
        figures[args.update] = update(figures[args.update], measured, NAMES[args.update])
        FIGURES.write_text(_json(figures))
    draw(figures, args.out)


def _json(figures: dict[str, Rows]) -> str:
    """One figure a line."""
    sections = (
        f'"{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]" for name, rows in figures.items()
    )
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    main()
