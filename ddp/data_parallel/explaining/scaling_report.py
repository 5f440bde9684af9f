"""What `model.explain(hosts=, gpus=, gbit=)` returns: the step in larger worlds, as a table, a plot and a dict."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp.data_parallel.explaining.all_reduce_models import Link
from ddp.data_parallel.explaining.extrapolate import Needed, ScaledStep
from ddp.errors import UnsupportedError

__all__ = ["ScalingReport"]

_BAR = 13  # characters of 100 %


@dataclass(frozen=True)
class ScalingReport:
    """Steps in worlds of 1 up to all ranks that were asked for, and what published speed-ups would need here.

    `str()` is a table of at most 80 columns with a bar for each efficiency. `local` and `network` are the links as
    assumed, `notes` say where they come from.
    """

    steps: Sequence[ScaledStep]
    needed: Sequence[Needed]
    ranks_per_host: int
    local: Link
    network: Link
    algorithm: str
    backend: str
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """All of it in numbers, strings, lists and dicts, as JSON has them; None for what is without limit."""
        return {
            "backend": self.backend,
            "algorithm": self.algorithm,
            "ranks_per_host": self.ranks_per_host,
            "local": _link_dict(self.local),
            "network": _link_dict(self.network),
            "steps": [_step_dict(step) for step in self.steps],
            "published": [_needed_dict(needed) for needed in self.needed],
            "notes": list(self.notes),
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw efficiency over ranks into a file, whose name's end says of what kind: .png, .svg, .pdf.

        Raises UnsupportedError without matplotlib, which is no dependency.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UnsupportedError(
                "plot() draws with matplotlib, which is not installed here: pip install matplotlib, or print the "
                "report, which has the same as bars of text"
            ) from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([s.ranks for s in self.steps], [100 * s.efficiency for s in self.steps], "o-", label="this model")
        for needed in self.needed:
            published = needed.published
            axes.plot(published.ranks, 100 * published.efficiency, "x", label=f"published: {published.title}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 105)
        axes.set_xlabel(f"ranks, {self.ranks_per_host} a host")
        axes.set_ylabel("efficiency, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path)

    def __str__(self) -> str:
        network = f"network {_gbit(self.network)} a host" if self.steps[-1].hosts > 1 else "no network"
        lines = [
            f"The step with more ranks: {self.ranks_per_host} a host, {network}, {self.algorithm} ({self.backend})",
            " ranks hosts   step ms     wire  exposed  slowest   times  efficiency",
        ]
        for step in self.steps:
            bar = "#" * round(_BAR * step.efficiency)
            lines.append(
                f"{step.ranks:6} {step.hosts:5} {_ms(step.step_s):>9} {_ms(step.wire_s):>8} {_ms(step.exposed_s):>8} "
                f"{_ms(step.straggling_s):>8} {step.speed_up:7.1f} {_percent(step.efficiency):>6} |{bar:{_BAR}}|"
            )
        lines += ["", "Published speed-ups, and what each would need here (one of, all else as it is):"]
        for needed in self.needed:
            lines += _needed_lines(needed)
        return "\n".join([*lines, "", *self.notes])


def _needed_lines(needed: Needed) -> list[str]:
    published, here = needed.published, needed.here
    given = "" if published.gbit is None else f", on {published.gbit:g} Gbit/s"
    said = f"  {published.title} ({_percent(published.efficiency)}{given}): here {here.speed_up:.0f} times"
    said += f" ({_percent(here.efficiency)})"
    if needed.is_reached:
        return [f"{said}, reached"]
    network = "no network is enough" if needed.gbit is None else f"network {_rate(needed.gbit)}"
    now = here.overlapped_s / here.wire_s if here.wire_s else 0.0
    overlap = "no overlap is enough" if needed.overlap is None else f"overlap {_percent(needed.overlap)}"
    spread = "no spread is enough" if needed.spread is None else f"spread {needed.spread:.2f} of here"
    return [said, f"      {network}; {overlap} (now {_percent(now)}); {spread}"]


def _step_dict(step: ScaledStep) -> dict[str, Any]:
    return {**asdict(step), "efficiency": step.efficiency, "speed_up": step.speed_up}


def _needed_dict(needed: Needed) -> dict[str, Any]:
    return {
        **asdict(needed.published),
        "here": _step_dict(needed.here),
        "is_reached": needed.is_reached,
        "needed_network_gbit": needed.gbit,
        "needed_overlap": needed.overlap,
        "needed_spread": _finite(needed.spread),
    }


def _link_dict(link: Link) -> dict[str, float | None]:
    return {"latency_s": link.latency_s, "bytes_per_s": _finite(link.bytes_per_s)}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _gbit(link: Link) -> str:
    return _rate(link.bytes_per_s * 8 / 1e9)


def _rate(gbit: float) -> str:
    return f"{gbit:.3g} Gbit/s" if gbit < 1000 else f"{gbit:.0f} Gbit/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
