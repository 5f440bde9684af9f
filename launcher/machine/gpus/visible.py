"""The GPUs that this host can give to workers.

Called by the agent on its own host. An inherited list of GPUs (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES,
ROCR_VISIBLE_DEVICES) restricts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.frozen import dataclass
from launcher.machine.gpus.card import Card, DriverError, listed, select
from launcher.machine.gpus.vendors import VENDORS, Vendor, by_torch
from launcher.machine.packages import torch_build


@dataclass(frozen=True)
class Gpus:
    """GPU ids in the order in which workers get them: integers, `GPU-<uuid>`, `MIG-<uuid>`.

    `verified` is False if only the environment names them and no driver answered; then there are no `bus_ids`.
    `numbers_are_certain` is False if a number may mean another card than the one at that place in `bus_ids`.
    `trouble` is the reason if torch was built for GPUs that their driver does not list, and the environment neither.
    """

    ids: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"
    verified: bool = False
    bus_ids: tuple[str, ...] = ()  # PCI addresses, of all or of none
    numbers_are_certain: bool = True
    trouble: str = ""


def find_gpus(env: Mapping[str, str]) -> Gpus:
    """Return the GPUs that this process's children may use: those that torch was built for.

    NVIDIA's count for a torch without GPU support. Raises UsageError if the environment names a missing GPU.
    """
    trouble = ""
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.is_present()], alone=True):
        try:
            cards = vendor.list_cards(env)
        except DriverError as error:
            if vendor.built == torch_build():
                trouble = str(error)
            continue
        if cards is not None:
            return _visible(vendor, cards, env)
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.inherited(env) or vendor.filter in env]):
        if (inherited := vendor.inherited(env)) is not None:
            ids = listed(inherited[1])
        else:
            ids = tuple(str(place) for place in range(len(listed(env[vendor.filter]))))
        return Gpus(ids, vendor.variables[0])
    return Gpus(trouble=trouble)


def _visible(vendor: Vendor, cards: Sequence[Card], env: Mapping[str, str]) -> Gpus:
    if (inherited := vendor.inherited(env)) is None:
        chosen = vendor.pick([card.name for card in cards], cards)
    else:
        variable, value = inherited
        chosen = vendor.pick(listed(value), select(value, cards, variable))
    return Gpus(
        tuple(card.name for card in chosen),
        vendor.variables[0],
        True,
        tuple(card.bus_id for card in chosen) if all(card.bus_id for card in chosen) else (),
        vendor.is_certain(chosen, cards, env),
    )
