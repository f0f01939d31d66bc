"""Launching one kernel on several simulated ranks, so that collectives have partners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nkisim.core.cores import Rendezvous, run_all
from nkisim.errors import BadLaunch
from nkisim.isa.target import target
from nkisim.launch import Session, jit
from nkisim.policy import Policy, chosen


def simulate_ranks(
    kernel: Any, world: int, policy: Policy | str | None = None
) -> Callable[[Sequence[tuple[Any, ...]]], list[Any]]:
    """Return a function from one argument tuple per rank to one output per rank.

    Raises:
        BadLaunch: the number of argument tuples is not `world`.
    """
    rules = chosen(policy)
    kernel = jit(kernel).launched(rules)

    def call(arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        geometry = target()
        if len(arguments) != world:
            actual = f"got {len(arguments)} argument tuples"
            raise BadLaunch("simulate_ranks", None, actual, f"one for each of the {world} ranks is needed")
        meeting = Rendezvous(world * kernel.lnc)
        sessions = []
        for rank in range(world):
            session = Session(kernel, rules, geometry, meeting, first=rank * kernel.lnc, rank=rank)
            session.bind(tuple(arguments[rank]), {})
            sessions.append(session)
        run_all(meeting, [body for session in sessions for body in session.bodies()])
        return [session.finish() for session in sessions]

    return call
