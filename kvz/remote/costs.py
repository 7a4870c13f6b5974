"""What reading a remote archive takes: bytes and requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvz.sections import Wanted

if TYPE_CHECKING:
    from kvz.archive import Archive


@dataclass(frozen=True, slots=True)
class FetchCost:
    """What must be transferred of a remote archive for something, opening it included."""

    what: str
    nbytes: int
    num_requests: int


def fetch_costs(archive: Archive) -> tuple[FetchCost, ...]:
    """For an archive that was just opened; empty for a local one."""
    if not archive.num_requests:
        return ()
    costs = [FetchCost("opening", archive.nbytes_read, archive.num_requests)]

    def add(what: str, wanted: Wanted, *, anchor_only: bool = False) -> None:
        requests = archive.requests(wanted, anchor_only=anchor_only)
        nbytes = costs[0].nbytes + sum(length for _, length in requests)
        costs.append(FetchCost(what, nbytes, costs[0].num_requests + len(requests)))

    if archive.layers:
        first = archive.layers[0]
        add(
            f"layer {first.index}",
            lambda tensor, chunk: archive.head.tensors[tensor].name in first.names,
        )
    if archive.table.num_first < archive.index.size:
        add("anchors", lambda tensor, chunk: True, anchor_only=True)
    add("all", lambda tensor, chunk: True)
    return tuple(costs)
