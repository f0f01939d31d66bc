"""The kernels of a checkout of nki-library, run unmodified at the shapes at which the vendor measured them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nkisim.command import sentence
from nkisim.errors import NkiValidationError
from nkisim.event import Event
from nkisim.install import install
from nkisim.launch import run
from nkisim.policy import POLICIES, Policy
from validation.library_calls import LibraryRow, call_of
from validation.rows import Row

GIVEN = Path(__file__).parent / "library_rows.json"
_DEFINED = re.compile(r"^(?:def|class) (\w+)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row's events and the policy that they needed, or the sentence in which the kernel was refused."""

    row: LibraryRow
    events: list[Event] | None
    policy: str
    refused: str = ""


def rows(path: Path = GIVEN) -> list[LibraryRow]:
    """The measured rows of a file.

    Raises:
        ValueError: the file has no such rows.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [_row(r) for r in listed]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no measured rows ({error!r}); {GIVEN.name} shows the form") from error


def _row(r: dict[str, Any]) -> LibraryRow:
    tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in r["tensors"].items()}
    us = r.get("measured_us", 0.0)
    return LibraryRow(r["id"], r["kernel"], tensors, r["arguments"], r["lnc"], r["lnc_from"], us, r["source"])


@contextmanager
def _older_namespace() -> Iterator[None]:
    """One kernel of the library takes its annotations from the namespace before `nki`; only its import may."""
    old = ModuleType("neuronxcc")
    vars(old).update(nki=sys.modules["nki"], __path__=[])
    rooms = {"neuronxcc": old, "neuronxcc.nki": old.nki, "neuronxcc.nki.typing": sys.modules["nki.typing"]}
    names = [name for name in rooms if name not in sys.modules]
    sys.modules.update((name, rooms[name]) for name in names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class Library:
    """A checkout: its modules by the names that they define."""

    def __init__(self, checkout: Path) -> None:
        roots = [p for p in (checkout / "src" / "nkilib_src", checkout / "src", checkout) if (p / "nkilib").is_dir()]
        if not roots:
            raise ValueError(f"{checkout} holds no nkilib; give a checkout of github.com/aws-neuron/nki-library")
        self.root = roots[0]
        self.modules: dict[str, str] = {}
        for path in sorted(self.root.glob("nkilib/**/*.py")):
            module = ".".join(path.relative_to(self.root).with_suffix("").parts)
            if not path.stem.endswith("_torch"):
                for name in _DEFINED.findall(path.read_text(encoding="utf-8")):
                    self.modules.setdefault(name, module)
        install()
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))

    def find(self, name: str) -> Any:
        """A function or class by its name.

        Raises:
            LookupError: the checkout defines no such name.
        """
        if name not in self.modules:
            raise LookupError(f"the checkout defines no {name}")
        with _older_namespace():
            return getattr(importlib.import_module(self.modules[name]), name)

    def record(self, row: LibraryRow) -> Recorded:
        """Run a row's kernel without arithmetic: by the default policy, then as the vendor's simulator would."""
        refused = ""
        for name in ("default", "vendor"):
            for numerics in (False, True):
                policy = replace(POLICIES[name], recording=True, numerics=numerics)
                try:
                    return Recorded(row, self._events(row, policy), name)
                except LookupError as error:
                    if type(error) is LookupError:
                        return Recorded(row, None, name, str(error))
                    refused = f"{type(error).__name__}: {error}"
                except NkiValidationError as error:
                    refused = f"{type(error).__name__}: {sentence(error)}"
                    if type(error).__name__ != "NotComputed":
                        break
                except Exception as error:  # the library's assertions and the like
                    refused = f"{type(error).__name__}: {sentence(error)}"
                    break
        return Recorded(row, None, "vendor", refused.replace(f"{self.root}/", ""))

    def _events(self, row: LibraryRow, policy: Policy) -> list[Event]:
        kernel, arguments = call_of(row, self.find)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(kernel[row.lnc], (), arguments, policy).recording.events


def timed(recorded: Recorded) -> Row:
    """A recorded row as the accuracy tables take it: one profiled launch, and pairs within one kernel."""
    row, events = recorded.row, recorded.events or []
    return Row(row.id, row.kernel, row.us, (lambda: events,), row.source, profiled=True)


def recordings(checkout: Path, listed: Iterable[LibraryRow]) -> Iterable[Recorded]:
    """Run every row, one after the other."""
    library = Library(checkout)
    return (library.record(row) for row in listed)
