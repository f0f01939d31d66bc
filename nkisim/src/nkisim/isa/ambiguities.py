"""What no document settles, or what devices are reported to do: a launch warns once, with the question for a device."""

from __future__ import annotations

import numpy as np

from nkisim.core import access
from nkisim.dtypes import Array
from nkisim.errors import AmbiguousManual, Reported, ReportedFault
from nkisim.isa.statement import Call
from nkisim.memory.tensor import NkiTensor

COPIES = frozenset({"tensor_copy", "dma_copy"})


def warn_ambiguous(call: Call, about: str, question: str) -> None:
    """Warn once in a launch."""
    text = f"{call.card.op}: {about}; no document says {question}: ask a device"
    call.core.warn(f"{call.card.op} {question}", text, AmbiguousManual)


def report(call: Call, actual: str, source: str, question: str) -> None:
    """Warn once in a launch of what is reported to fail, or refuse it as the policy says."""
    allowed = f"{source}; ask a device {question}"
    if call.core.policy.reported == "raise":
        call.refuse(ReportedFault, None, actual, allowed)
    call.core.warn(f"{call.card.op} {question}", f"{call.card.op}: {actual}; {allowed}", Reported)


def of_chains(call: Call) -> None:
    """A product is added to elements of PSUM after a different accumulation chain began in their tensor."""
    actual = f"adds to a chain of {call.tensors['dst'].name} after another chain began in that tensor"
    source = "on trn1 the first partial sums were lost (foxl-ai/kiln, tools/probe_psum_interleave.py)"
    report(call, actual, source, "whether chains that are open together in one PSUM tensor keep their sums")


def of_skipped(call: Call, valid: Array) -> None:
    """A gather or scatter skips some of its rows."""
    if valid.any() and not valid.all():
        source = "an indirect transpose that does stopped a trn2 until its reset (aws-neuron-sdk issue 1390)"
        report(call, "skips some of its rows and moves others", source, "whether a transfer may skip some rows")


def of_bias(call: Call) -> None:
    """An activation that copies has a bias."""
    if call.args["op"].name == "copy" and ("bias" in call.tensors or call.args["bias"]):
        source = "a trn1 did not add it (aws-neuron-sdk issue 1296)"
        report(call, "copies and has a bias", source, "whether nl.copy adds a bias")


def of_copies(call: Call) -> None:
    """The result of nl.copy is read after its source was written."""
    for name, tensor in call.tensors.items():
        copied = tensor._storage.copied
        if copied is not None and copied[0].writes != copied[1] and name != "dst":
            source = "on a trn1 both were the same bytes (nki-samples issue 78)"
            report(call, f"reads nl.copy's result {tensor.name} after its source was written", source,
                   "whether nl.copy copies, or call nisa.tensor_copy")  # fmt: skip


def of_operands(call: Call) -> None:
    """Warn of ambiguities in the operands' start partitions; equal calls share the warning."""
    inputs = [call.tensors[o.name] for o in call.card.operands if o.role != "out" and o.name in call.tensors]
    wide = [t for t in inputs if t.buffer.value == "sbuf" and t.size > t.shape[0] and call.engine != "dma"]
    if len({_start(t) for t in wide}) > 1 and call.engine != "tensor":
        warn_ambiguous(call, "two SBUF inputs start at different partitions", "whether an engine reads both")


def of_addresses(call: Call, writes: list[NkiTensor]) -> None:
    """Warn of ambiguities in where results go: several to one place, or over what is still to be read."""
    for target in writes:
        if 0 in target.strides and any(n > 1 for step, n in zip(target.strides, target.shape, strict=True) if not step):
            warn_ambiguous(call, "dst has a step of 0", "which of its elements stays")
        source = call.tensors.get("src")
        if source is None or call.card.op not in COPIES or source._storage is not target._storage:
            continue
        if _meet(source, target):
            warn_ambiguous(call, "src and dst overlap", "whether all of src is read before dst is written")


def of_rows(call: Call, rows: Array) -> None:
    """Warn of ambiguities in a scatter's rows."""
    if len(np.unique(rows)) < len(rows):
        warn_ambiguous(call, "two rows of a scatter go to one place", "which of them stays")


def of_largest(call: Call, results: list[Array]) -> list[Array]:
    """Warn of NaN among the largest values; return the results as they are."""
    if np.isnan(results[0]).any():
        warn_ambiguous(call, "src holds NaN", "whether NaN is larger than every number, as it is here")
    return results


def _start(tensor: NkiTensor) -> int:
    return int(access.extent(tensor)[1])


def _meet(a: NkiTensor, b: NkiTensor) -> bool:
    """Whether two different views of a storage can touch the same bytes."""
    if a._layout() == b._layout():
        return False
    (_, p, q, low, high, *_), (_, r, s, first, last, *_) = access.extent(a), access.extent(b)
    return bool(p < s and r < q and low < last and first < high)
