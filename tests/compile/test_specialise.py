"""NKI kernels in NEFFs: the vendor's form of each call, over a stand-in of its seam, and bundles without it.

The stand-in is of the private seam by which frameworks specialise kernels with the vendor's `nki`, as nkipy calls it.
It makes no IR: each file says that it is a stand-in. Names, results and aliases are those of the kernel, which nkisim
runs on zeros. Form of the configuration: zml/zml and aws-neuron/nkipy.
"""

from __future__ import annotations

import base64
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nkisim
from compile.build import build
from compile.doctor import findings
from compile.neuron import specialise
from compile.neuron.specialise import KERNELS_FOLDER
from model.nki.launches import LNC, TARGET
from model.nki.table import KERNELS
from tests.compile import fake_sdk
from tests.compile.tiny import refused, spec
from tests.model.family import untraced
from trnspec.bundle import hlo
from trnspec.bundle.opening import Bundle, damage, read_bundle
from trnspec.runtime.xla import XlaRunner

CALLING = {"kernels": "nki", "k": 1, "batch": 1}
VERSION = "0.7.0+stand-in"
# names of the kernels that were specialised, and aliases that each gets in addition
SPECIALISED: list[str] = []
ALIASES: dict[int, int] = {}


@dataclass(frozen=True)
class Kernel:
    """What `nki.jit` gives there."""

    func: Callable[..., Any]
    lnc: int = 1
    schedule: tuple[Any, ...] = ()
    _enable_backend_opt: bool = False


@dataclass(frozen=True)
class CompileKernel(Kernel):
    target: str = ""
    artifacts_dir: str = ""
    _frontend_cls: Any = field(default=SimpleNamespace)

    def _compile_opts(self) -> Any:
        return SimpleNamespace(target=self.target)

    def _cached_compile_to_bir(self, *, frontend: Any, inputs: dict[str, Any], compile_opts: Any) -> Any:
        SPECIALISED.append(self.func.__name__)
        assert list(inputs) == list(inspect.signature(self.func).parameters)
        assert not any(isinstance(value, (tuple, list)) for value in inputs.values()), "only top-level tensors count"
        config = _config(self, {n: np.zeros_like(v) if isinstance(v, np.ndarray) else v for n, v in inputs.items()})
        return SimpleNamespace(build_config=lambda: config)


def _config(kernel: CompileKernel, inputs: dict[str, Any]) -> Any:
    tensors = [name for name, value in inputs.items() if isinstance(value, np.ndarray)]
    aliases: dict[int, int] = {}

    def traced(*given: Any) -> Any:
        found, fresh = kernel.func(*given), []
        for at, value in enumerate(found if isinstance(found, tuple) else (found,)):
            same = [name for name, one in zip(inputs, given, strict=True) if one is value]
            if same:
                aliases[tensors.index(same[0])] = at
            else:
                fresh.append(value)
        return tuple(fresh)

    outputs = list(nkisim.simulate(nkisim.jit(traced)[kernel.lnc])(*inputs.values()))
    for operand, at in sorted(aliases.items(), key=lambda pair: pair[1]):
        outputs.insert(at, inputs[tensors[operand]])
    names = [f"output{at}" for at in range(len(outputs))]
    for operand, at in aliases.items():
        names[at], tensors[operand] = tensors[operand], f"{tensors[operand]}.must_alias_input"
    file = Path(kernel.artifacts_dir) / f"{kernel.func.__name__}.bir"
    file.write_text(f"a stand-in of {kernel.func.__name__} on {kernel.lnc} cores: no IR\n", encoding="utf-8")
    binary = {
        "binary": str(file), "input_names": tensors, "output_names": names, "version_identifier": VERSION,
        "aliases": [[tensors[operand], names[at]] for operand, at in aliases.items()],
    }  # fmt: skip
    call = {
        "func_name": kernel.func.__name__, "platform_target": kernel.target, "kernel_format": "bir",
        "kernel_version": 1, "klir_binary": binary, "grid": [kernel.lnc], "has_collectives": False, "mac_count": 0,
    }  # fmt: skip
    return SimpleNamespace(
        backend_config_b64=base64.b64encode(json.dumps(call).encode()),
        output_specs=[SimpleNamespace(shape=o.shape, dtype=o.dtype) for o in outputs],
        operand_output_aliases=aliases | ALIASES,
        has_collectives=False,
    )


def find_nki(patch: pytest.MonkeyPatch) -> None:
    """Let the seam be found, and our kernels be what the vendor's `nki.jit` would have made of them."""
    patch.setitem(sys.modules, "nki.framework.compiled", SimpleNamespace(CompileKernel=CompileKernel))
    for name, kernel in KERNELS.items():
        patch.setitem(KERNELS, name, Kernel(kernel.fn))


def _calls(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.custom_call_target == TARGET]


@pytest.fixture(scope="module")
def made(base: Path) -> tuple[Bundle, int]:
    """A bundle that was built where neuronx-cc and nki are, and how many kernels were specialised for it."""
    with pytest.MonkeyPatch.context() as patch:
        fake_sdk.write_compiler(base / "bin")
        patch.setenv("PATH", str(base / "bin"), prepend=":")
        find_nki(patch)
        SPECIALISED.clear()
        bundle = read_bundle(build(spec(base, "specialised", **CALLING)))
        count = len(SPECIALISED)
        again = read_bundle(build(spec(base, "specialised", **CALLING)))
        assert again.manifest.digest == bundle.manifest.digest
    return again, count


def test_a_bundle_has_each_kernel_and_its_graphs_call_them_in_the_vendor_s_form(made: tuple[Bundle, int]) -> None:
    bundle, count = made
    assert (bundle.manifest.compiler.neff, bundle.manifest.compiler.kernels) == ("neff", "bir")
    assert damage(bundle) == []
    assert findings(bundle) == []
    called, launches = set[str](), set[bytes]()
    for graph in bundle.graphs:
        names = graph.file, f"{KERNELS_FOLDER}/{graph.key.name}.hlo.pb"
        plain, given = (_calls(hlo.parse(bytes(bundle.read(name)))) for name in names)
        assert plain
        called |= {_check_call(one, other) for one, other in zip(plain, given, strict=True)}
        launches |= {one.backend_config for one in plain}
    assert count == len(launches), "each launch is specialised once for all graphs"
    assert {f"{KERNELS_FOLDER}/{name}" for name in called} <= bundle.files.keys()
    assert all(b"stand-in" in bundle.read(f"{KERNELS_FOLDER}/{name}") for name in called)
    assert any(json.loads(launch)["changed"] for launch in launches)


def _check_call(plain: Any, specialised: Any) -> str:
    """The kernel's file of a call that has the vendor's form."""
    value, launch = json.loads(base64.b64decode(specialised.backend_config)), json.loads(plain.backend_config)
    binary = value["klir_binary"]
    assert value["func_name"] == KERNELS[launch["kernel"]].fn.__name__
    assert (value["platform_target"], value["kernel_format"], value["grid"]) == ("trn2", "bir", [LNC])
    assert len(binary["input_names"]) == len(specialised.operand_ids)
    changed = [binary["input_names"][i] for i in launch["changed"]]
    assert [pair[0] for pair in binary["aliases"]] == changed
    assert all(name.endswith(".must_alias_input") for name in changed)
    aliased = {(a.operand_index, a.output_shape_index[0]) for a in specialised.output_operand_aliasing}
    assert aliased == {(n, len(launch["results"]) + at) for at, n in enumerate(launch["changed"])}
    name: str = binary["binary"]
    return name


def test_a_kernel_that_is_gone_is_named(made: tuple[Bundle, int]) -> None:
    bundle, _ = made
    module = hlo.parse(bytes(bundle.read(f"{KERNELS_FOLDER}/{bundle.graphs[0].key.name}.hlo.pb")))
    call = _calls(module)[0]
    value = json.loads(base64.b64decode(call.backend_config))
    value["klir_binary"]["binary"] = "0123/gone.bir"
    call.backend_config = base64.b64encode(json.dumps(value).encode())
    assert specialise.missing_kernel_files(module.SerializeToString(), bundle.files) == [
        "it calls 0123/gone.bir, which the bundle lacks (NCC_EVRF059)"
    ]
    assert specialise.missing_kernel_files(b"no graph", bundle.files) == ["it is no specialised graph (DecodeError)"]


def test_refusals_of_nki(made: tuple[Bundle, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = made
    proto = bytes(bundle.read(bundle.graphs[0].file))
    for name, value, said in (
        ("VERSION", object(), ["nki does not take the kernel ", ": Object of type object is not JSON ser"]),
        ("ALIASES", {0: 0}, ["nki gives ", " the results ", " 0: 0} and the cores [2], the graph has"]),
    ):
        with monkeypatch.context() as patch:
            find_nki(patch)
            patch.setitem(globals(), name, value)
            refused(lambda: specialise.specialised(proto, tmp_path, {}), *said)


def test_without_nki_every_entry_point_says_so(base: Path, compiler: Path) -> None:
    assert not specialise.available(), "nkisim answers to the name nki and has no such seam"
    said = "gets no NEFFs: its graphs launch NKI kernels and this machine has neuronx-cc"
    refused(lambda: build(spec(base, "new", **CALLING, toolchain="neuron")), said)
    path = untraced(spec(base, "none", **CALLING))
    compiled = read_bundle(path).manifest.compiler
    assert (compiled.neff, compiled.kernels) == ("none", "none")
    said = "its graphs call NKI kernels that were compiled for no device"
    refused(lambda: XlaRunner(read_bundle(path), "neuron"), said)
