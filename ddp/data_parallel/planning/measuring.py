"""What is measured of a model, by the arguments of its wrapper, and the planner that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.compression.compressors import Auto, Half, Int8, PowerSGD
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.planning.bucket_planner import BucketPlanner
from ddp.data_parallel.planning.clock import clock_of
from ddp.data_parallel.planning.link_cost import exchange_ratio
from ddp.data_parallel.planning.measure_compression import measure_compression
from ddp.data_parallel.planning.measure_link import measure_link
from ddp.data_parallel.planning.ranks_on_hosts import ranks_on_hosts
from ddp.errors import ArgumentError, UnsupportedError
from ddp.torch_internals import backend_of, sums_in_rank_order

__all__ = ["Measuring"]


@dataclass(frozen=True)
class Measuring:
    """What is measured of a model: the same on every rank.

    `is_on`: the link when it is wrapped, and its first steps. `plans`: whether the sizes of buckets follow from that;
    "exact" means only where the averages stay the same to the bit. `among`: compressions that may be used if they pay.
    `argument`: the one by which the user wants something decided.
    """

    is_on: bool = False
    plans: Literal["yes", "no", "exact"] = "no"
    among: tuple[str, ...] = ()
    argument: str | None = None

    @staticmethod
    def asked(
        measure: bool | None,
        cap_mb: float | Literal["auto"] | None,
        caps_mb: Sequence[float] | None,
        compression: str | Auto | Half | Int8 | PowerSGD | None,
        device: torch.device,
        *,
        init_sync: bool,
    ) -> Measuring:
        """What the arguments of a wrapper ask for. `measure` is None where it was not given: then not on a device.

        Raises ArgumentError if they contradict each other, UnsupportedError for what cannot be measured on `device`.
        """
        auto = Auto() if compression == "auto" else compression if isinstance(compression, Auto) else None
        if cap_mb == "auto" or auto is not None:
            what = 'bucket_cap_mb="auto"' if cap_mb == "auto" else 'compression="auto"'
            if measure is False:
                raise ArgumentError(f"measure=False, but {what} decides by measurement: leave one of them out")
            if device.type != "cpu":
                raise UnsupportedError(
                    f"{what} on {device}: by measurement, buckets and compression are chosen on the CPU alone. Give a "
                    "size or the name of a compression"
                )
            plans: Literal["yes", "no", "exact"] = "yes" if cap_mb == "auto" else "no"
            return Measuring(True, plans, () if auto is None else tuple(auto.among), what)
        is_wanted = device.type == "cpu" if measure is None else measure
        is_on = is_wanted and init_sync and cap_mb is None and not caps_mb
        return Measuring(is_on, "exact" if is_on and compression is None and device.type == "cpu" else "no")

    def planner(
        self,
        channel: Channel,
        parameters: Sequence[tuple[str, torch.Tensor]],
        compressed_limits: BucketLimits,
        compress: Callable[[str], None],
    ) -> BucketPlanner | None:
        """Measure the link, and compression where that may come; None if nothing is, nor on several devices.

        Every rank must call it; blocks.
        """
        trained = [parameter for _, parameter in parameters if parameter.requires_grad]
        if not self.is_on or len({parameter.device for parameter in trained}) > 1:
            return None
        device = trained[0].device
        hosts = ranks_on_hosts(channel)
        ratio = exchange_ratio(str(backend_of(channel.group, device).name()), channel.group.size(), hosts)
        costs = measure_compression(channel, self.among, trained, compressed_limits.cap_bytes)
        return BucketPlanner(
            channel,
            measure_link(channel, device),
            clock_of(device),
            hosts=hosts,
            replans=self.plans == "yes" or (self.plans == "exact" and _are_exact(channel.group, device)),
            asked=self.argument,
            compressions=[replace(cost, wire_ratio=cost.wire_ratio * ratio) for cost in costs],
            compressed_limits=compressed_limits,
            compress=compress,
        )


def _are_exact(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether sums have the same bits whatever travels together: two numbers have one sum.

    With more ranks, the order of a ring's additions depends on where in its tensor a number is.
    """
    return group.size() <= 2 or sums_in_rank_order(group, device)
