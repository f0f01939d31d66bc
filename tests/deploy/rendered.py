"""Rendered folders as tests read them: parsed from the files, never the renderer's own objects."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from deploy.render import render
from deploy.values import DEFAULTS, Values, load_values

# what the values file leaves to its user
FILLED = (
    "storage.bucket=specdec-artifacts",
    "images.tools=registry.internal/specdec-tools:0.1.0",
    "images.lm_eval=registry.internal/specdec-lm-eval:0.1.0",
)
SET = [part for change in FILLED for part in ("--set", change)]
OURS = ("images.server=registry.internal/specdec-server:0.1.0", "server.engine=trnspec")
Manifest = dict[str, Any]


def values_of(*changes: str) -> Values:
    """The shipped values, filled in, with changes."""
    return load_values(DEFAULTS, (*FILLED, *changes))


def rendered(out: Path, *changes: str, validated: bool = False) -> Path:
    """The folder of the shipped values with changes; schemas take a second a folder."""
    with nullcontext() if validated else patch("deploy.render.validate"):
        render(values_of(*changes), out)
    return out


def manifests(folder: Path) -> list[Manifest]:
    """Every Kubernetes object below a folder."""
    files = sorted([*folder.glob("base/*.yaml"), *folder.glob("jobs/*.yaml")])
    return [m for file in files for m in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def one(folder: Path, kind: str, part: str = "") -> Manifest:
    """The object of a kind whose name, without the version of a Job, ends in a part."""
    named = [(m, re.sub(r"-[0-9a-f]{8}$", "", m["metadata"]["name"])) for m in manifests(folder) if m["kind"] == kind]
    (found,) = [m for m, name in named if name.endswith(part)]
    return found


def pods(folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Every pod template's spec with the kind of its owner."""
    for manifest in manifests(folder):
        if manifest["kind"] in ("Deployment", "Job"):
            yield manifest["kind"], manifest["spec"]["template"]["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(folder: Path, owner: str, name: str) -> Manifest:
    """A container of the Deployment (-baseline, -speculative) or the Job whose name ends in `owner`."""
    kind = "Deployment" if owner.startswith("-") else "Job"
    return next(c for c in containers(one(folder, kind, owner)["spec"]["template"]["spec"]) if c["name"] == name)


def flags(command: list[str]) -> dict[str, str]:
    """The values of a command's flags, written with a space or an equals sign."""
    words = list(itertools.chain.from_iterable(w.split("=", 1) if w.startswith("--") else [w] for w in command))
    return {a[2:]: b for a, b in itertools.pairwise(words) if a.startswith("--")}


def environment(of: Manifest) -> dict[str, str]:
    return {e["name"]: e["value"] for e in of["env"] if "value" in e}


def every_text(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*")) if file.is_file())
