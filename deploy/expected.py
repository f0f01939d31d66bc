"""What a server is about to load, against what it was asked for: the engine itself does not compare."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile.serve_command import CONFIG, MODEL, neuron_fields
from model.bundle.weights import shard_file
from model.drafting import KINDS, recorded
from model.errors import UserError


@dataclass(frozen=True)
class Expected:
    """The shape that a server's flags ask for; k is 0 and the drafter none for a server without speculation."""

    tp: int
    batch: int
    max_len: int
    k: int
    lnc: int
    drafter: str

    @property
    def arguments(self) -> list[str]:
        """As flags of the commands that check it."""
        named: dict[str, int | str] = {"tp": self.tp, "batch": self.batch, "max-len": self.max_len, "k": self.k}
        named |= {"lnc": self.lnc, "drafter": self.drafter}
        return [part for name, value in named.items() for part in (f"--{name}", str(value))]

    @property
    def neuron_config(self) -> dict[str, Any]:
        """The fields of NxDI's neuron_config that follow from it."""
        fields = neuron_fields(self.tp, self.batch, self.max_len, self.k, self.lnc)
        return fields | {"enable_fused_speculation": KINDS[self.drafter].has_model}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("tp", "batch", "max-len", "k", "lnc"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--drafter", choices=KINDS, required=True)


def expected_of(options: argparse.Namespace) -> Expected:
    return Expected(options.tp, options.batch, options.max_len, options.k, options.lnc, options.drafter)


def check_manifest(manifest: dict[str, Any], expected: Expected, where: str) -> None:
    """Raise UserError unless a bundle's manifest is what the server was asked for, compiled and whole."""
    built = {name: manifest[name] for name in ("tp", "batch", "max_len", "k")} | {"drafter": recorded(manifest).kind}
    for name, value in built.items():
        if value != getattr(expected, name):
            raise UserError(
                f"{where} was built for {name} {value} and the server is asked for {getattr(expected, name)}; "
                "render again from the values that it was built with, or build it again"
            )
    if manifest["neff"] == "none" or MODEL not in manifest["files"]:
        raise UserError(f"{where} was built without the Neuron SDK and has no {MODEL}; build it where the SDK is")
    if missing := [rank for rank in range(expected.tp) if shard_file(rank) not in manifest["files"]]:
        raise UserError(f"{where} lacks the weights of ranks {missing[:5]}; build it with both checkpoints")


def check_config(folder: Path, expected: Expected) -> None:
    """Raise UserError unless a folder's neuron_config.json says what was asked for."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["neuron_config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/{CONFIG} cannot be read ({type(error).__name__}); the compilation did not finish, run it again"
        ) from error
    for name, value in expected.neuron_config.items():
        if found.get(name) != value:
            raise UserError(
                f"{folder}/{CONFIG} has {name} {found.get(name)!r} and the server needs {value!r}; build it again"
            )
