"""A small target with a draft of each kind, whose drafts are accepted sometimes, and their bundles.

Tests share the bundles of a session, because tracing and compiling graphs takes most of the suite's time. A test sets
other options only to test them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from filelock import FileLock

import compile.build
from compile.build import build
from compile.doctor import findings
from compile.spec import BuildSpec
from model.graph_spec import GraphSpec
from model.nki import simulated
from tests.compile.tiny import spec, write_model
from tests.eager_graphs import EagerGraphs, eager_graphs
from tests.last_few import last_few
from tests.model.heads import MASK, write_block, write_head
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import is_cache
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.runtime.xla import XlaRunner

E = TypeVar("E", bound=Engine)
V = 64
NOT_TRACED = b"not traced"
# flags of each drafter
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"k": "0"},
    "chain": {"draft": "chain", "k": "1,3"},
    "parallel": {"draft": "parallel"},
    "eagle3": {"draft": "eagle3"},
    "dflash": {"draft": "dflash"},
    "dspark": {"draft": "dspark"},
    "ngram": {"drafter": "ngram", "k": "1,3"},
    # the target drafts for itself: all drafts are accepted
    "itself": {"draft": "target"},
}
_PLAIN = str.maketrans("(), ", "____")


def write_family(folder: Path) -> Path:
    """Writes the target and its drafts. The first layer of `chain` and `parallel` is the target's."""
    # with head dims under 16 a row's bits may depend on the number of rows
    heads = {"num_key_value_heads": 1, "head_dim": 32}
    sizes: dict[str, Any] = {"scale": 0.35, "eos_token_id": None, **heads}
    target = write_model(folder / "target", 5, num_hidden_layers=2, **sizes)
    write_head(folder / "eagle3", target, taps=(0, 1), **heads)
    write_model(folder / "chain", 5, num_hidden_layers=1, **sizes)
    write_model(folder / "parallel", 5, num_hidden_layers=1, pard_token=MASK, **sizes)
    for name, form in (("dflash", "z-lab"), ("dspark", "deepspec")):
        write_block(folder / name, target, form, taps=(1, 2), scale=0.3, **heads)
    return folder


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the family, shared by all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "family"
    with FileLock(f"{folder}.lock"):
        return folder if folder.exists() else write_family(folder)


def family_spec(folder: Path, drafter: str, **changes: Any) -> BuildSpec:
    """By default k 3, batch 3, max_len 128, fp32, tp 1; with another max_len, the default chunk sizes."""
    flags: dict[str, Any] = {"chunks": ()} if "max_len" in changes else {}
    flags |= DRAFTERS[drafter] | changes
    # without a draft folder the spec has the default draft, which a build ignores
    flags["draft"] = str(folder / flags["draft"]) if "draft" in flags else BuildSpec.draft
    name = "-".join(["of", drafter, *(f"{k}{Path(str(v)).name}" for k, v in changes.items())]).translate(_PLAIN)
    return spec(folder, name, **{"batch": 3} | flags)


def caches(graphs: XlaRunner) -> dict[str, np.ndarray]:
    """The KV pools of a runner by name; ranks are concatenated along the first axis."""
    return {t.name: np.asarray(graphs._state[t.name]) for t in graphs.bundle.plan.state if is_cache(t.name)}


@last_few
def graphs(folder: Path, drafter: str = "chain", **changes: Any) -> XlaRunner:
    """A runner of a drafter's bundle, which has passed the doctor."""
    plan = family_spec(folder, drafter, **changes)
    with FileLock(f"{plan.out}.lock"):
        bundle = read_bundle(build(plan))
    assert not findings(bundle)
    return XlaRunner(bundle)


@last_few
def eager(folder: Path, drafter: str = "chain", **changes: Any) -> EagerGraphs:
    """A drafter's graphs in eager torch, on one rank in fp32."""
    plan = family_spec(folder, drafter, **changes)
    return eager_graphs(plan.bundle, plan.checkpoints, simulated.serve)


def eager_engine(
    folder: Path, drafter: str = "chain", speculative: bool = True, kind: type[E] = Engine, **changes: Any
) -> E:  # type: ignore[assignment]
    """An engine on `eager` graphs; their caches contain data of earlier engines."""
    shape = engine_config(SimpleNamespace(spec=family_spec(folder, drafter, **changes).bundle))  # type: ignore[arg-type]
    return kind(eager(folder, drafter, **changes), shape, speculative)


class AsTheyRun(XlaRunner):
    """A runner that traces a graph on first use if the bundle has no trace of it."""

    def _load(self, graph: GraphSpec) -> None:
        if self._protos[graph.key] == NOT_TRACED:
            ((_, self._protos[graph.key]),) = compile.build.lower_graphs(self.bundle.spec, [graph])
        super()._load(graph)


def untraced(plan: BuildSpec) -> Path:
    """Builds a bundle without traces, for tests that use a few graphs: tracing all is slow."""
    with mock.patch.object(compile.build, "lower_graphs", lambda _, graphs: ((g, NOT_TRACED) for g in graphs)):
        return build(plan)


@last_few
def some_graphs(folder: Path, drafter: str = "chain", **changes: Any) -> XlaRunner:
    """A runner of a drafter's bundle, which traces graphs on first use."""
    plan = family_spec(folder, drafter, **changes)
    with FileLock(f"{plan.out}-untraced.lock"):
        return AsTheyRun(read_bundle(untraced(dataclasses.replace(plan, out=f"{plan.out}-untraced"))))
