"""The entry points: simulate, jit, NKI_SIMULATOR, the older entry, torch, in-place inputs, installing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim import errors
from nkisim.install import cpu_simulate
from nkisim.lines import kernel_line


@nkisim.jit
def double(a: Any, factor: float = 2.0) -> Any:
    """Multiply by a factor."""
    x = nl.load(a)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=factor)
    return out(x)


DATA = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_every_entry_point_gives_the_same() -> None:
    assert np.array_equal(nkisim.simulate(double)(DATA), 2 * DATA)
    assert np.array_equal(nkisim.simulate(double[1])(DATA, factor=3.0), 3 * DATA)
    assert np.array_equal(cpu_simulate(double)[1](a=DATA), 2 * DATA)
    assert np.array_equal(nkisim.simulate(double.fn)(DATA), 2 * DATA)
    assert double.__doc__ == "Multiply by a factor."


def test_torch_in_torch_out_and_in_place() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    result = nkisim.simulate(double)(a)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, a * 2)

    def change(x: Any) -> Any:
        nisa.dma_copy(dst=x[0:1], src=tile(1, 4, "bfloat16", 7))
        return x

    nkisim.simulate(change)(a)
    assert a[0].tolist() == [7.0] * 4


def test_mutated_numpy_inputs_are_written_back() -> None:
    def change(x: Any, y: Any) -> Any:
        nisa.dma_copy(dst=x[:, 1:2], src=tile(3, 1, value=-1))
        return out(nl.load(y))

    x, y = DATA.copy(), DATA.copy()
    run(change, x, y)
    assert x[:, 1].tolist() == [-1.0] * 3
    assert np.array_equal(y, DATA)
    x[:] = 0
    x.flags.writeable = False
    with pytest.raises(errors.BadInput, match="read-only"):
        run(change, x, y)


def test_the_same_array_twice_is_one_tensor() -> None:
    def kernel(a: Any, b: Any) -> Any:
        nisa.dma_copy(dst=a, src=tile(3, 4, value=5))
        return out(nl.load(b))

    x = DATA.copy()
    assert (run(kernel, x, x) == 5).all()


def test_other_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nisa.get_nc_version() is nisa.nc_version.gen3
    for name, law in (("trn1", errors.NotSimulated), ("trn9", errors.BadLaunch)):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)
        with pytest.raises(law):
            run(double.fn, DATA)


def test_explicit_order_reaches_the_events() -> None:
    def kernel(a: Any) -> Any:
        x = nl.load(a)
        first = nisa.memset(dst=tile(3, 4), value=0.0, name="first")
        nisa.activation(dst=x, op=nl.exp, data=x, name="second").depends_on(first)
        with nl.no_reorder():
            nisa.memset(dst=tile(3, 4), value=0.0)
        return out(x)

    policy = nkisim.Policy(recording=True)
    events = nkisim.run(kernel, (DATA,), policy=policy).recording.events
    at = {e.name: i for i, e in enumerate(events) if e.name}
    assert events[at["second"]].after == (at["first"],)
    scheduled = nkisim.jit(kernel).with_schedule([("first", "second")])
    result = nkisim.run(scheduled, (DATA,), policy=policy).recording.events
    assert at["second"] in result[at["first"]].after


def test_recording_holds_addresses_lines_and_work() -> None:
    result = nkisim.run(double, (DATA,), policy=nkisim.Policy(recording=True))
    load, scale, store = result.recording.events
    assert (load.engine, load.op, load.work["bytes"]) == ("dma", "dma_copy", 48)
    assert load.writes[0].span == (0, 16)
    assert load.writes[0].partitions == (0, 3)
    assert load.reads[0].space == "hbm"
    assert scale.work["elements"] == 4
    assert scale.line[0] == __file__
    assert store.reads[0].tensor == scale.writes[0].tensor
    assert nkisim.run(double, (DATA,)).recording.events == []


@pytest.mark.slow
def test_installing_answers_to_nki() -> None:
    code = (
        "import nkisim; assert nkisim.install()\n"
        "import numpy as np, nki, nki.language as nl, nki.isa as nisa, nki.collectives\n"
        "import nki.typing as nt, nki_cpu_simulator\n"
        "from nki.isa.constants import oob_mode\n"
        "from nki.isa import constants\n"
        "from nki.language import dtypes\n"
        "assert constants.oob_mode is oob_mode is nisa.oob_mode\n"
        "@nki.jit\n"
        "def k(a: nt.tensor[4, 4]):\n"
        "    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)\n"
        "    nisa.dma_copy(dst=out, src=nl.load(a), oob_mode=oob_mode.error)\n"
        "    return out\n"
        "x = np.ones((4, 4), nl.float32)\n"
        "assert (nki.cpu_simulate(k)[1](a=x) == x).all() and (nki.simulate(k)(x) == x).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_forms_of_the_migration_guide_run() -> None:
    def kernel(x: Any) -> Any:
        result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tiles = nl.ndarray((3, 2, 4), dtype=x.dtype, buffer=nl.sbuf)
        tiles[0:3, 0, 0:4] = nl.load(x)
        tiles[0:3, 1, 0:4] = tiles[0:3, 0, 0:4]
        tiles[0:3, 1, 0:2] = 7
        result[...] = tiles[0:3, 1, 0:4]
        return result

    expected = DATA.copy()
    expected[:, 0:2] = 7
    assert np.array_equal(run(kernel, DATA), expected)


def test_a_register_is_loaded_from_one_element_of_one_dimension() -> None:
    def kernel(x: Any) -> Any:
        register = nisa.register_alloc()
        nisa.register_load(register, nl.full([1], 2, dtype=nl.int32, buffer=nl.sbuf))
        return out(nl.load(x[nl.ds(register, 1), :]))

    assert np.array_equal(run(kernel, DATA), DATA[2:3])


def test_a_tensor_has_the_address_that_the_kernel_chose() -> None:
    seen = []

    def kernel() -> Any:
        x = nl.zeros((64, 8), nl.bfloat16)
        placed = nl.ndarray((64, 256), nl.bfloat16, address=(64, 1024))
        seen.extend((x.address, placed.address, placed[32:64, 16:32].address))
        return out(x)

    run(kernel)
    assert seen == [None, (64, 1024), (96, 1056)]


def test_device_print_and_repr_show_values(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel() -> Any:
        x = tile(1, 2, value=3)
        nl.device_print("x", x)
        print(x)
        return out(x)

    run(kernel)
    assert "x [[3. 3.]]" in capsys.readouterr().out


def test_arguments_bind_as_python_binds_them() -> None:
    def kernel(a: Any, scale: float = 2.0, *more: Any, shift: float = 0.0, **named: Any) -> Any:
        x = nl.load(a)
        for extra in (*more, *named.values()):
            nisa.tensor_tensor(dst=x, data1=x, data2=nl.load(extra), op=nl.add)
        nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=shift)
        return out(x)

    assert np.array_equal(nkisim.simulate(kernel)(DATA, shift=1.0), 2 * DATA + 1)
    assert np.array_equal(nkisim.simulate(kernel)(DATA, 1.0, DATA, third=DATA), 3 * DATA)
    nested = nkisim.simulate(lambda d: out(nl.load(d["x"][0])))
    assert np.array_equal(nested({"x": (DATA,)}), DATA)


def test_index_tensors_are_reads_of_the_event() -> None:
    def kernel(a: Any, rows: Any) -> Any:
        idx, x = nl.load(rows), nl.ndarray((2, 4), dtype=nl.float32)
        nisa.dma_copy(dst=x, src=a.vector_select(0, idx))
        return out(x)

    rows = np.array([[2], [0]], np.uint32)
    result = nkisim.run(kernel, (DATA, rows), policy=nkisim.Policy(recording=True))
    assert np.array_equal(result.outputs, DATA[[2, 0]])
    load, gather, _ = result.recording.events
    assert load.writes[0].tensor in [e.tensor for e in gather.reads]
    assert gather.work["dge"] == "swdge"


def test_jitted_kernels_need_a_device_or_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = nkisim.jit(lambda: out(tile()))
    with pytest.raises(errors.NoDevice):
        kernel()
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert kernel().shape == (128, 8)


def test_a_folder_whose_name_begins_like_the_package_is_a_kernel_s() -> None:
    package = str(Path(nkisim.__file__).parent)
    for folder, inside in ((f"{package}_kernels", False), (f"{package}/isa", True)):
        file = f"{folder}/softmax.py"
        scope = {"line": kernel_line}
        exec(compile("line_ = line()", file, "exec"), scope)
        assert (scope["line_"] == (file, 1)) is not inside
