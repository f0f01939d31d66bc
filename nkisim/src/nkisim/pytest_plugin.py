"""pytest: `nki_kernel` holds a kernel against its law, the marker `nki_latency` bounds its time; `--nki`: a version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from nkisim import inputs
from nkisim.dtypes import FLOATS
from nkisim.event import Event
from nkisim.host_io import flat
from nkisim.inputs import HOSTILE, ArrayInput
from nkisim.install import install
from nkisim.launch import Kernel, jit, run
from nkisim.policy import Policy, chosen
from nkisim.timeline.drawing import clock
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.versions import VARIABLE, VERSIONS


@dataclass
class KernelRuns:
    """The value of the fixture `nki_kernel`; kernels run as `policy` says, "default" unless a test sets it.

    Inputs are arrays, words such as "float32:128x512:large:7", tuples of those, and values that pass as they are.
    """

    policy: Policy | str = "default"
    recording: bool = False
    recorded: list[tuple[str, list[Event]]] = field(default_factory=list)

    def run(self, kernel: Any, *values: Any, lnc: int = 1) -> Any:
        """Run a kernel and return its outputs, which may not be all zero."""
        outputs = self._run(jit(kernel)[lnc], tuple(map(_array, values)), self.recording)
        for name, array in flat(outputs):
            assert np.any(array), f"{name_of(kernel)}: {name} is all zero"
        return outputs

    def check(
        self,
        kernel: Any,
        law: Any,
        values: Sequence[Any],
        *,
        odd: Sequence[Sequence[Any]] = (),
        hostile: Sequence[str] = HOSTILE,
        rtol: float = 0.0,
        of_largest: float = 0.0,
        lnc: int = 1,
    ) -> None:
        """Compare a kernel with its law, a function of the same inputs, at `values`, `odd` shapes, hostile numbers.

        An element may differ by `rtol` of the law's, and by `of_largest` of the largest finite number that the law
        gives; by default not at all. NaN and infinities must be where the law has them, and no output may be all zero
        where the law's is not. Only the run at `values` counts for a latency.
        """
        device = jit(kernel)[lnc]
        cases: list[tuple[str, Sequence[Any], str | None]] = [("ordinary numbers", values, None)]
        cases += [(f"the odd shape {number}", inputs_, None) for number, inputs_ in enumerate(odd, 1)]
        cases += [(f"numbers of the kind {kind!r}", values, kind) for kind in hostile]
        for number, (text, inputs_, kind) in enumerate(cases):
            expected = law(*(_array(value, kind) for value in inputs_))
            arrays = tuple(_array(value, kind) for value in inputs_)
            result = self._run(device, arrays, self.recording and number == 0)
            where = f"{name_of(kernel)} at {text}"
            pairs = list(zip(flat(result), flat(expected), strict=True))
            assert pairs, f"{where}: the kernel returns no array"
            for (name, array), (_, lawful) in pairs:
                compare(f"{where}: {name}", array, lawful, (rtol, of_largest))

    def _run(self, kernel: Kernel, arrays: tuple[Any, ...], recording: bool) -> Any:
        rules = chosen(self.policy)
        if not recording:
            return run(kernel, arrays, policy=rules).outputs
        result = run(kernel, arrays, policy=replace(rules, recording=True))
        self.recorded.append((name_of(kernel), result.recording.events))
        return result.outputs


def name_of(kernel: Any) -> str:
    """The kernel's name."""
    return getattr(kernel, "__name__", type(kernel).__name__)


def _array(value: Any, kind: str | None = None) -> Any:
    """An input as the kernel gets it, floats replaced by numbers of a kind if one is given."""
    if isinstance(value, tuple):
        return tuple(_array(item, kind) for item in value)
    if isinstance(value, str):
        return inputs.filled(inputs.read(value)[1], kind)
    if isinstance(value, np.ndarray):
        if kind and value.dtype.name in FLOATS:
            return ArrayInput(value.dtype.name, value.shape, kind).array()
        return value.copy()
    return value


def compare(where: str, result: Any, lawful: Any, tolerance: tuple[float, float]) -> None:
    """Hold one output against the law's.

    Raises:
        AssertionError: they differ by more than the tolerance.
    """
    assert result.shape == lawful.shape, f"{where} has shape {result.shape} and the law's has {lawful.shape}"
    assert result.any() or not lawful.any(), f"{where} is all zero and the law's is not"
    a, b = result.astype(np.float64), lawful.astype(np.float64)
    rtol, of_largest = tolerance
    largest = float(np.abs(b[np.isfinite(b)]).max(initial=0))
    with np.errstate(all="ignore"):
        error = np.abs(a - b) - rtol * np.abs(b) - of_largest * largest
    right = (np.isfinite(a) & np.isfinite(b) & (error <= 0)) | (a == b) | (np.isnan(a) & np.isnan(b))
    if right.all():
        return
    wrong = ~right
    at = np.unravel_index(int(np.argmax(np.where(wrong, np.nan_to_num(error, nan=np.inf), -np.inf))), error.shape)
    raise AssertionError(
        f"{where}: {int(wrong.sum())} of {wrong.size} elements differ from the law's, the worst at "
        f"{list(map(int, at))}: {a[at]:.6g} where the law says {b[at]:.6g} (rtol {rtol:g}, "
        f"of the largest {of_largest:g})"
    )


def too_slow(name: str, result: Schedule, max_us: float) -> str:
    """A sentence if a schedule takes longer than allowed, else nothing."""
    if result.latency_ns <= max_us * 1e3:
        return ""
    largest = sorted(result.waits_ns.items(), key=lambda item: -item[1])[:3]
    path = ", ".join(f"{cause} {time / result.latency_ns:.0%}" for cause, time in largest)
    return (
        f"{name} takes {clock(result.latency_ns)} (simulated on {result.chip}, without a launch; possible "
        f"{clock(result.low_ns)} to {clock(result.high_ns)}) and max_us is {max_us:g}; its critical path: {path}"
    )


RUNS = pytest.StashKey[KernelRuns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Choose the version of the language for every launch that names none."""
    parser.addoption("--nki", choices=VERSIONS, help=f"the version of NKI that kernels run in (default: ${VARIABLE})")


def pytest_configure(config: pytest.Config) -> None:
    """Answer to `import nki` where the vendor's is absent, and register the marker with pytest."""
    install()
    if config.getoption("nki"):
        used = pytest.MonkeyPatch()
        used.setenv(VARIABLE, config.getoption("nki"))
        config.add_cleanup(used.undo)
    config.addinivalue_line(
        "markers", "nki_latency(max_us): what nki_kernel runs takes at most max_us microseconds (simulated)"
    )


@pytest.fixture
def nki_kernel(request: pytest.FixtureRequest) -> KernelRuns:
    """Run kernels, and hold them against their laws."""
    runs = KernelRuns(recording=request.node.get_closest_marker("nki_latency") is not None)
    request.node.stash[RUNS] = runs
    return runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """After a marked test that passed: schedule its launches."""
    yield
    marker = item.get_closest_marker("nki_latency")
    if marker is None:
        return
    max_us = marker.kwargs.get("max_us")
    if marker.args or set(marker.kwargs) != {"max_us"} or not isinstance(max_us, (int, float)):
        pytest.fail("nki_latency takes max_us=MICROSECONDS and nothing else", pytrace=False)
    runs = item.stash.get(RUNS, None)
    if runs is None or not runs.recorded:
        pytest.fail("the test is marked nki_latency and ran no kernel through nki_kernel", pytrace=False)
    sentences = [too_slow(name, schedule(events), max_us) for name, events in runs.recorded]
    if any(sentences):
        pytest.fail("\n".join(filter(None, sentences)), pytrace=False)
