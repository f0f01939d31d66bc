"""Lines of a kernel: the caller outside this package, and where an exception came from."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

from nkisim.errors import Line

_PACKAGE = os.path.join(Path(__file__).resolve().parent, "")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = os.path.join(sysconfig.get_path("purelib"), "")
# whether a file belongs to this package
_OURS: dict[str, bool] = {}


def _is_library(name: str) -> bool:
    """Whether a file is of the standard library, which this package may call."""
    return name.startswith(_LIBRARY) and not name.startswith(_INSTALLED)


def kernel_line() -> Line:
    """Return file and line of the innermost caller outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = _OURS.get(name)
        if ours is None:
            ours = _OURS[name] = name.startswith(_PACKAGE)
        if not ours:
            return (name, frame.f_lineno)
        frame = frame.f_back
    return ("<unknown>", 0)


def failing_line(trace: TracebackType | None) -> Line | None:
    """Return the kernel line of an exception: its innermost frame outside this package."""
    result: Line | None = None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not _is_library(name):
            result = (name, trace.tb_lineno)
        trace = trace.tb_next
    return result


def asserted(trace: TracebackType | None) -> str:
    """Return the source of an assertion that failed without a message."""
    line = failing_line(trace)
    text = linecache.getline(*line).strip() if line else ""
    lists = "; shapes are tuples here: compare with (...), not [...]" if ".shape" in text and "[" in text else ""
    return f"`{text}` does not hold{lists}"
