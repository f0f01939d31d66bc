"""What a compiler is taken to do to a kernel before it runs, as named choices of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = ("lesser", "program", "reordered")
# the order of a schedule in words
ORDER = {"program": "in the kernel's order", "reordered": "reordered as a compiler might"}


@dataclass(frozen=True, slots=True)
class CompilerModel:
    """What one compiler does; docs/time.md lists what else is assumed of it.

    Attributes:
        order: "program" keeps each engine's instructions as written, which fits versions of a kernel that the compiler
            did not reorder (single iterations, explicit edges); "reordered" lets engines run ahead in a window of a
            few hundred instructions, which fits loops over independent tiles; "lesser" takes the faster one.
            Default: "lesser".
        spread_copies: copies that name no engine go to the Vector or the Scalar Engine, whichever would end them
            first; off, to the Vector Engine. Only a reordered program spreads them.
            Default: True.

    Raises:
        ValueError: no order has that name.
    """

    order: str = "lesser"
    spread_copies: bool = True

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"an order cannot be {self.order!r}; it can be {', '.join(ORDERS)}")


COMPILER = CompilerModel()
