"""`python -m compile.graph.conversion`: a process beside the one that traces, which makes HLO of StableHLO.

A conversion holds the interpreter's lock, so a thread would gain nothing. This process knows neither torch nor JAX. It
reads modules from its input and writes their protos to its output, each behind its length, and ends with its input.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO

from jaxlib import _jax

from model.errors import UserError
from trnspec.bundle import hlo

_LENGTH = struct.Struct("<Q")


def converted(module: bytes) -> bytes:
    """The canonical HloModuleProto of a StableHLO module in bytecode."""
    computation = _jax.mlir.mlir_module_to_xla_computation(module, use_tuple_args=False)
    return hlo.canonical(computation.as_serialized_hlo_module_proto())


class Converter:
    """Conversions in another process, one after the other; it ends with the context."""

    def __enter__(self) -> Converter:
        # a group of its own: what interrupts this process would show a traceback there
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        # while this one traces, a thread waits for the other process
        self._thread = ThreadPoolExecutor(1)
        return self

    def convert(self, module: bytes) -> Future[bytes]:
        """Begin a conversion behind the earlier ones; UserError if the process has ended, as it does without memory."""
        return self._thread.submit(self._answer, module)

    def _answer(self, module: bytes) -> bytes:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked
        assert answers
        try:
            _write(asked, module)
            if (proto := _read(answers)) is not None:
                return proto
        except BrokenPipeError:
            pass
        raise UserError(
            f"the process that makes HLO ended with status {self._process.wait()}; what it said stands above, and "
            "-9 means that the machine has no memory left"
        )

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.shutdown(cancel_futures=True)
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            # a module that it has not read
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(_LENGTH.pack(len(content)))
    file.write(content)
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """What `_write` has written; None at the end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = file.read(length)
    return content if len(content) == length else None


def main() -> None:
    """Convert until the input ends."""
    while (module := _read(sys.stdin.buffer)) is not None:
        _write(sys.stdout.buffer, converted(module))


if __name__ == "__main__":
    main()
