"""Who goes first: the orders of the line."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import ConfigError
from octavo.request import Request

AGEING_SECONDS = 60.0
"""Waiting this long is worth one level of priority, so that nothing waits for ever."""

Order = Callable[[Request, int], float]
"""(request, its serial number of arrival) -> rank; smaller goes first. Fixed for a request's whole life:
with an order that never changes, two sequences cannot displace each other in turn."""


def fcfs(request: Request, serial: int) -> float:
    """First come, first served."""
    return float(serial)


def priority(request: Request, serial: int) -> float:
    """Smaller `priority` first (as in vLLM), with linear ageing.

    The aged priority at time t is priority - (t - arrival) / AGEING_SECONDS. The term in t is the same
    for everyone, so the order between two requests does not depend on t and can be computed once.
    """
    return request.priority * AGEING_SECONDS + request.arrival


_ORDERS: dict[str, Order] = {"fcfs": fcfs, "priority": priority}


def admission_order(name: str) -> Order:
    """The order called `name`; ConfigError if there is none."""
    if name not in _ORDERS:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(_ORDERS)}")
    return _ORDERS[name]
