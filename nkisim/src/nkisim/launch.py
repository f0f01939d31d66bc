"""Launching kernels: nki.jit, nki.simulate, the grid, and the run on one or two cores."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkisim import host_io
from nkisim.compiler import CompileConfig, SpecializationConfig
from nkisim.core import races
from nkisim.core.context import Core, enter, running
from nkisim.core.cores import Rendezvous, run_all
from nkisim.core.recording import build
from nkisim.errors import (
    BadInput,
    BadLaunch,
    CoresDiverge,
    KernelInsideKernel,
    LawError,
    LoopMisuse,
    NoDevice,
    NotSimulated,
    OtherVersion,
    PsumFull,
    Relaxed,
    SbufFull,
)
from nkisim.event import Peak, Recording
from nkisim.geometry import CORE_V3, Geometry
from nkisim.isa.target import target
from nkisim.lines import asserted, failing_line
from nkisim.memory.memory import CoreMemory, SharedMemory
from nkisim.memory.packing import pack
from nkisim.memory.placement import Region, place, regions
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import NKIObject
from nkisim.policy import Policy, chosen


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a launch: the outputs, and the recording when it was on."""

    outputs: Any
    recording: Recording
    peaks: tuple[Peak, ...]


class Kernel:
    """A function that runs on the device; kernel[lnc] selects one or two cores."""

    def __init__(self, fn: Callable[..., Any], lnc: int = 1, grid: bool = False) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.lnc = lnc
        self.grid = grid
        self.schedule: tuple[Any, ...] = ()
        self.config: CompileConfig | None = None
        self.specialization: SpecializationConfig | None = None

    def _changed(self, **fields: Any) -> Kernel:
        kernel = copy.copy(self)
        kernel.__dict__.update(fields)
        return kernel

    def __getitem__(self, lnc: Any) -> Kernel:
        count = lnc[0] if isinstance(lnc, tuple) and len(lnc) == 1 else lnc
        if not isinstance(count, (int, np.integer)) or count not in (1, 2):
            raise BadLaunch("kernel", None, f"is launched on [{lnc!r}]", "[1] and [2] exist on trn2")
        return self._changed(lnc=int(count), grid=True)

    def with_schedule(self, pairs: Any) -> Kernel:
        """Order named instructions: [(consumer, producer or list of producers), ...]."""
        return self._changed(schedule=tuple(pairs))

    def launched(self, policy: Policy) -> Kernel:
        """Return the kernel with the cores of its launch: in 0.7, without a grid, of NEURON_LOGICAL_NC_CONFIG.

        Raises:
            OtherVersion: it has options of 0.7 in a launch of 0.6.
            BadLaunch: its grid, its options and the environment disagree.
            NotSimulated: an option takes memory, and no document says how much.
        """
        name, requested = self.fn.__name__, os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        if not policy.traced:
            if self.config or self.specialization:
                actual = "has compile_config or specialization_config"
                raise OtherVersion(
                    name, None, actual, "they came with NKI 0.7; leave them out or choose 0.7 (NKISIM_NKI)"
                )
            return self
        frontend = os.environ.get("NKI_COMPILER_FRONTEND")
        if frontend in ("custom", "parser"):
            raise BadLaunch(name, "NKI_COMPILER_FRONTEND", f"is {frontend}", "0.7 traces here; choose 0.6 (NKISIM_NKI)")
        if self.config and self.config.prefetch_auto:
            raise NotSimulated(name, "prefetch_auto", "no document says how much of SBUF its ring takes")
        if requested is None or requested == str(self.lnc):
            return self
        if self.grid or requested not in ("1", "2"):
            actual = f"is {requested} and the kernel is launched on {self.lnc}"
            raise BadLaunch(name, "NEURON_LOGICAL_NC_CONFIG", actual, "it is 1 or 2, and equals a grid (EVRF066)")
        return self._changed(lnc=int(requested))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        core = running()
        if core is not None:
            return self._inline(core, args, kwargs)
        if os.environ.get("NKI_SIMULATOR") == "1":
            return run(self, args, kwargs).outputs
        allowed = "use nki.simulate(kernel)(...) or set NKI_SIMULATOR=1"
        raise NoDevice(self.fn.__name__, None, "was called and there is no NeuronCore", allowed)

    def _inline(self, core: Core, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, allowed = self.fn.__name__, "leave functions that kernels call undecorated"
        if core.policy.traced:
            return self._nested(core, name)(*args, **kwargs)
        if core.policy.inner_kernels == "raise":
            raise KernelInsideKernel(name, None, "was called inside a kernel", allowed)
        core.warn(f"inner kernel {name}", f"{name}: was called inside a kernel and is inlined; {allowed}", Relaxed)
        return self.fn(*args, **kwargs)

    def _nested(self, core: Core, name: str) -> Callable[..., Any]:
        """Return the function that 0.7 inlines; its options must be those of the kernel that is launched."""
        if self.config is not None and self.config != core.config[0]:
            allowed = "give both one compile_config, or SpecializationConfig(allow_nested_config_override=True)"
            actual = "has a compile_config that the launched kernel does not have"
            if not core.config[1]:
                raise KernelInsideKernel(name, None, actual, allowed)
            core.warn(f"config of {name}", f"{name}: {actual}; it is inlined under the launched one's", Relaxed)
        return self.fn


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    compile_config: CompileConfig | None = None,
    specialization_config: SpecializationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Make a kernel of a function; usable bare and with keyword arguments, which are ignored but for 0.7's options."""
    if fn is None:
        options: dict[str, Any] = {"compile_config": compile_config, "specialization_config": specialization_config}
        return lambda function: jit(function, **options, **kwargs)
    if isinstance(fn, Kernel):
        return fn
    return Kernel(fn)._changed(config=compile_config, specialization=specialization_config)


def simulate(kernel: Any) -> Callable[..., Any]:
    """Return a function that runs the kernel here: numpy in, numpy out; torch in, torch out."""
    kernel = jit(kernel)

    @functools.wraps(kernel.fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(kernel, args, kwargs).outputs

    return call


def run(
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    policy: Policy | str | None = None,
    geometry: Geometry | None = None,
) -> Result:
    """Run a kernel and return its outputs, its recording and its memory peaks.

    Raises:
        LawError: the kernel broke a law of the machine, named by the subclass.
    """
    kernel = jit(kernel)
    geometry = geometry or target()
    if running() is not None:
        allowed = "launch kernels from the host"
        raise KernelInsideKernel(kernel.fn.__name__, None, "was launched inside a kernel", allowed)
    policy = chosen(policy)
    kernel = kernel.launched(policy)
    if policy.recording and geometry.generation > CORE_V3.generation:
        why = "no figure of its engines is public; run the kernel without its times, or time it for trn2"
        raise NotSimulated("timeline", f"target={geometry.name}", why)
    meeting = Rendezvous(kernel.lnc)
    session = Session(kernel, policy, geometry, meeting, first=0, rank=0)
    session.bind(args, kwargs or {})
    run_all(meeting, session.bodies())
    outputs = session.finish()
    return Result(outputs, build(session.cores, kernel.schedule, session.peaks), session.peaks)


_OF_TENSORS = frozenset(["shape", "strides", "offset", "dtype", "buffer", "_on_chip", "_storage", *dir(NkiTensor)])


@dataclass(frozen=True, slots=True)
class _ObjectCopy:
    """An NKIObject argument that holds arrays; each core gets a copy of its attributes (manual)."""

    kind: type
    fields: dict[str, Any]


def _holds_arrays(values: Iterable[Any]) -> bool:
    inside = [v.values() if type(v) is dict else v for v in values if isinstance(v, (tuple, dict))]
    nested = [vars(v).values() for v in values if isinstance(v, NKIObject)]
    return any(host_io.is_array(v) for v in values) or any(map(_holds_arrays, [*inside, *nested]))


def _rebuilt(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Return a tuple of the same kind, named or not."""
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


class Session:
    """One rank of a launch while it runs: its HBM, its cores, its arguments."""

    def __init__(
        self, kernel: Kernel, policy: Policy, geometry: Geometry, meeting: Rendezvous, *, first: int, rank: int
    ) -> None:
        self.kernel, self.policy, self.geometry = kernel, policy, geometry
        self.memory = SharedMemory(geometry, policy, kernel.lnc)
        self.peaks: tuple[Peak, ...] = ()
        self.arguments: list[host_io.Argument] = []
        self.torch = False
        self.warned: set[str] = set()
        self.results: list[Any] = [None] * kernel.lnc
        overrides = kernel.specialization is not None and kernel.specialization.allow_nested_config_override
        config = (kernel.config, overrides)
        self.cores = [
            Core(first + i, i, kernel.lnc, kernel.grid, CoreMemory(first + i, self.memory), policy,
                 geometry, meeting, rank, warned=self.warned, config=config)
            for i in range(kernel.lnc)
        ]  # fmt: skip

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the host's arrays into HBM, once for all cores."""
        bound = inspect.signature(self.kernel.fn).bind(*args, **kwargs)
        self.values = {n: self._admit(n, v) for n, v in bound.arguments.items()}

    def _admit(self, name: str, value: Any) -> Any:
        if host_io.is_array(value):
            for known in self.arguments:
                if known.host is value:
                    return known
            self.torch = self.torch or host_io.is_torch(value)
            argument = host_io.to_device(self.memory, value, name)
            self.arguments.append(argument)
            return argument
        if isinstance(value, list) and any(host_io.is_array(v) for v in value):
            raise BadInput("launch", f"argument {name}", "is a list of arrays", "pass a tuple")
        if isinstance(value, tuple):
            return _rebuilt(value, [self._admit(f"{name}.{i}", v) for i, v in enumerate(value)])
        if type(value) is dict:
            return {k: self._admit(f"{name}.{k}", v) for k, v in value.items()}
        if isinstance(value, NKIObject) and _holds_arrays(vars(value).values()):
            return _ObjectCopy(type(value), {k: self._admit(f"{name}.{k}", v) for k, v in vars(value).items()})
        return value

    def _lower(self, value: Any) -> Any:
        if isinstance(value, host_io.Argument):
            return host_io.device_view(value)
        if isinstance(value, tuple):
            return _rebuilt(value, [self._lower(v) for v in value])
        if isinstance(value, _ObjectCopy):
            lowered: Any = object.__new__(value.kind)
            lowered.__dict__.update({k: self._lower(v) for k, v in value.fields.items()})
            return lowered
        if type(value) is dict:
            return {k: self._lower(v) for k, v in value.items()}
        return value

    def bodies(self) -> list[Callable[[], None]]:
        """Return the instructions that each core executes."""
        return [functools.partial(self._body, i) for i in range(len(self.cores))]

    def _body(self, index: int) -> None:
        core = self.cores[index]
        before = enter(core)
        try:
            with np.errstate(all="ignore"):
                self.results[index] = self._call()
            if core.prepared is not None:
                actual = "is without its trigger at the end of the kernel"
                raise LoopMisuse(f"{core.prepared.op}_prepare", None, actual, f"call {core.prepared.op}_trigger")
        except LawError as error:
            if error.line is None:
                error.line = failing_line(error.__traceback__)
            raise
        except AttributeError as error:
            if error.name not in _OF_TENSORS or isinstance(error.obj, NkiTensor):
                raise
            allowed = "pass a numpy or torch array to the kernel, or load one"
            wrong = BadInput("launch", f"a {type(error.obj).__name__}", "is used as a tensor", allowed)
            wrong.line = failing_line(error.__traceback__)
            raise wrong from error
        except AssertionError as error:
            if not error.args:
                error.args = (asserted(error.__traceback__),)
            raise
        finally:
            enter(before)

    def _call(self) -> Any:
        bound = inspect.signature(self.kernel.fn).bind_partial()
        bound.arguments.update({n: self._lower(v) for n, v in self.values.items()})
        return self.kernel.fn(*bound.args, **bound.kwargs)

    def _place(self, core: Core, region: Region) -> Peak | None:
        """Give the tensors of one memory their addresses; None where they do not fit and the policy warns."""
        allocations, policy = core.memory.allocations, self.policy
        try:
            return place(allocations, region)
        except (SbufFull, PsumFull) as full:
            if policy.packing == "partitions":
                with contextlib.suppress(SbufFull, PsumFull):
                    peak = pack(allocations, region, self.geometry)
                    text = f"tensors on disjoint partitions of {region.space} share bytes, or they would not fit"
                    core.warn(f"packing {region.space}", f"{text}; no document says that the compiler does so", Relaxed)
                    return peak
            if policy.capacity is True or policy.recording:
                raise
            core.warn(f"capacity {region.space}", str(full), Relaxed)
            return None

    def finish(self) -> Any:
        """Check memory, write mutated inputs back, and return the outputs of core 0."""
        if self.policy.capacity:
            regions_ = [(core, r) for core in self.cores for r in regions(core.number, self.geometry)]
            self.peaks = tuple(peak for core, r in regions_ if (peak := self._place(core, r)) is not None)
        with np.errstate(all="ignore"):
            for storage in [*self.memory.shared.values(), *self.memory.inputs]:
                races.judge(storage)
            outputs = [host_io.to_host(c, r, self.torch) for c, r in zip(self.cores, self.results, strict=True)]
            if not all(host_io.is_same(self.results[0], other) for other in self.results[1:]):
                allowed = "return the same tensors in nl.shared_hbm on both cores"
                raise CoresDiverge("launch", "return value", "differs between the two cores", allowed)
            for argument in self.arguments:
                host_io.write_back(argument)
        return outputs[0]
