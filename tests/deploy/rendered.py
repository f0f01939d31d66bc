"""Rendered folders as tests read them: parsed from the files, never from the renderer's own objects."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import deploy
from deploy.values import Values, check, load_values

VALUES = Path(deploy.__file__).with_name("values.yaml")
# what the values file leaves to its user
FILLED = (
    "storage.bucket=specdec-artifacts",
    "images.tools=registry.internal/specdec-tools:0.1.0",
    "images.lm_eval=registry.internal/specdec-lm-eval:0.1.0",
)
SET = [part for change in FILLED for part in ("--set", change)]
Manifest = dict[str, Any]


@cache
def default_values() -> Values:
    return load_values(VALUES, FILLED)


def changed(**parts: dict[str, Any] | str) -> Values:
    """The default values with some replaced; a part's fields are given as a dict."""
    values = default_values()
    for name, change in parts.items():
        if isinstance(change, dict):
            change = dataclasses.replace(getattr(values, name), **change)
        values = dataclasses.replace(values, **{name: change})
    check(values)
    return values


def manifests(folder: Path) -> list[Manifest]:
    """Every Kubernetes object below a folder."""
    files = sorted([*folder.glob("base/*.yaml"), *folder.glob("jobs/*.yaml")])
    found = [m for file in files for m in yaml.safe_load_all(file.read_text(encoding="utf-8"))]
    return [m for m in found if m["kind"] != "Kustomization"]


def unversioned(name: str) -> str:
    """A Job's name without the version that it ends in."""
    return re.sub(r"-[0-9a-f]{8}$", "", name)


def one(folder: Path, kind: str, part: str = "") -> Manifest:
    """The object of a kind whose name, but for a version, ends in a part."""
    found = [m for m in manifests(folder) if m["kind"] == kind and unversioned(m["metadata"]["name"]).endswith(part)]
    assert len(found) == 1, f"{kind} {part}: {[m['metadata']['name'] for m in found]}"
    return found[0]


def pods(folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Every pod template's spec with the name of what makes it."""
    for manifest in manifests(folder):
        if manifest["kind"] in ("Deployment", "Job"):
            yield unversioned(manifest["metadata"]["name"]), manifest["spec"]["template"]["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(folder: Path, owner: str, name: str) -> Manifest:
    spec = next(spec for found, spec in pods(folder) if found.endswith(owner))
    return next(c for c in containers(spec) if c["name"] == name)


def flags(command: list[str]) -> dict[str, str]:
    """The values of a command's flags."""
    return {a[2:]: b for a, b in itertools.pairwise(command) if a.startswith("--") and len(a) > 2}


def environment(found: Manifest) -> dict[str, str]:
    return {e["name"]: e["value"] for e in found["env"] if "value" in e}


def speculative_config(folder: Path) -> dict[str, Any]:
    command = container(folder, "-speculative", "server")["command"]
    config: dict[str, Any] = json.loads(flags(command)["speculative-config"])
    return config


def policies(folder: Path) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("iam/*.json")}


def every_text(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*")) if file.is_file())
