"""Reduction registers of the Vector and Scalar Engines: reset, reduce, load, read out."""

from __future__ import annotations

import numpy as np

from nkisim.dtypes import Array
from nkisim.enums import reduce_cmd
from nkisim.errors import AccumulatorUndefined, WrongArgument
from nkisim.isa.operators import Fn, maximum, minimum
from nkisim.isa.statement import Call, Rule

START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
_COMBINE: dict[str, Fn] = {
    "add": np.add,
    "subtract": np.add,
    "multiply": np.multiply,
    "maximum": maximum,
    "minimum": minimum,
}


def first_lane(call: Call, operand: str) -> slice:
    """Return the lanes of an operand's partitions."""
    tensor = call.tensors[operand]
    start = tensor.offset // tensor._row() if tensor.offset else 0
    start += tensor._storage.info.start_partition
    return slice(start, start + tensor.shape[0])


def update(call: Call, partial: Array, op: str, load: Array | float | None = None) -> Array | None:
    """Apply reduce_cmd to the registers with this instruction's partial result; return them.

    Raises:
        AccumulatorUndefined: accumulating on undefined registers.
    """
    command = call.args["reduce_cmd"]
    lanes = call.core.registers(call.engine)
    rows = first_lane(call, "dst")
    if command is reduce_cmd.idle:
        return None
    if command is reduce_cmd.load_reduce:
        value = _COMBINE[op](np.asarray(load, np.float32), partial)
    elif command is reduce_cmd.reduce:
        value = _COMBINE[op](read(call, rows), partial)
    elif command is reduce_cmd.reset:
        value = np.full_like(partial, START[op])
    else:
        value = partial
    if lanes.operator is None:
        lanes.values[...] = np.nan
    lanes.values[rows] = value
    lanes.operator, lanes.lost_to = op, None
    return value


def read(call: Call, rows: slice) -> Array:
    """Return the registers' values.

    Raises:
        AccumulatorUndefined: nothing defined is in them.
    """
    lanes = call.core.registers(call.engine)
    values = lanes.values[rows]
    if lanes.operator is None:
        why = f"were left undefined by {lanes.lost_to}" if lanes.lost_to else "were never reset"
        call.refuse(AccumulatorUndefined, "reduction registers", why, "use reset_reduce first")
    return values


def lose(call: Call) -> None:
    """Mark the registers undefined: an idle instruction may clobber them (manual)."""
    lanes = call.core.registers(call.engine)
    lanes.operator, lanes.lost_to = None, call.card.op


def commands(*allowed: reduce_cmd) -> Rule:
    """Return the rule that reduce_cmd is one of the allowed ones."""

    def rule(call: Call) -> None:
        if call.args["reduce_cmd"] not in allowed:
            options = ", ".join(c.name for c in allowed)
            call.refuse(WrongArgument, "reduce_cmd", f"is {call.args['reduce_cmd']}", f"it can be {options}")

    return rule
