"""The memory maps of this process: a graph that XLA compiles for the CPU takes hundreds, and Linux has a limit."""

from __future__ import annotations

from pathlib import Path

from model.errors import UserError

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# more than twice the maps of the largest graph of the demo pair at k 15; a graph of more layers takes more
_OF_A_GRAPH = 4000


def used() -> int:
    """Maps of this process; 0 where the system does not say."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def limit() -> int:
    """The most that a process may have; 0 where the system does not say."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else 0


def check_room() -> None:
    """UserError where the next graph may not fit: beyond the limit XLA ends the process in a segmentation fault."""
    if (most := limit()) and (held := used()) + _OF_A_GRAPH > most:
        raise UserError(
            f"this process has {held} memory maps of the {most} that Linux allows it (vm.max_map_count), and a graph "
            f"compiled for the CPU may take {_OF_A_GRAPH}; raise the limit, or close bundles that are not used"
        )
