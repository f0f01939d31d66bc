"""The pytest plugin: each promise by a test that passes and one that fails, run by pytest inside pytest."""

from __future__ import annotations

import os

import pytest

from nkisim.versions import VARIABLE

KERNELS = """
import nki, nki.isa as nisa, nki.language as nl
import numpy as np, pytest

@nki.jit
def scale(a, factor):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    x = nl.load(a)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=x)
    return out

def law(a, factor):
    return a.astype(np.float64) * factor
"""
INPUTS = '["float32:128x64", 3.0]'
ODD = "odd=[['float32:7x3', 2.0]], rtol=1e-6"

PASSES = {
    "hostile numbers and odd shapes": f"nki_kernel.check(scale, law, {INPUTS}, {ODD})",
    "arrays": "nki_kernel.check(scale, law, [np.ones((128, 4), np.float32), 2.0])",
    "a run": "assert (nki_kernel.run(scale, 'float32:128x4:ones', 2.0) == 2).all()",
    "zero where the law is zero": "nki_kernel.check(scale, law, ['float32:128x4:zeros', 2.0], hostile=())",
    "a different policy": "nki_kernel.policy = 'vendor'; nki_kernel.run(scale, 'float32:128x4', 2.0)",
}
NEAR = "nki_kernel.check(scale, lambda a, f: law(a, f) + 1e-6, ['float32:128x64', 3.0], hostile=(), of_largest={})"
PASSES["near the largest"] = NEAR.format(1e-6)
FAILS = {
    "not near the largest": (NEAR.format(1e-8), "*elements differ from the law's, the worst at *"),
    "a wrong law": (
        f"nki_kernel.check(scale, lambda a, f: a * 3.5, {INPUTS}, rtol=1e-6)",
        "*scale at ordinary numbers: output: 8192 of 8192 elements differ from the law's, the worst at *",
    ),
    "wrong at large numbers only": (
        f"nki_kernel.check(scale, lambda a, f: np.clip(law(a, f), -1e9, 1e9), {INPUTS}, rtol=1e-6)",
        "*scale at numbers of the kind 'large': output: *",
    ),
    "a NaN that the law does not have": (
        f"nki_kernel.check(scale, lambda a, f: np.nan_to_num(law(a, f)), {INPUTS}, rtol=1e-6)",
        "*scale at numbers of the kind 'nan': output: 1 of 8192 elements differ from the law's, the worst at "
        "*: nan where the law says 0 *",
    ),
    "wrong at an odd shape": (
        f"nki_kernel.check(scale, lambda a, f: law(a, f) + (len(a) == 7), {INPUTS}, {ODD})",
        "*scale at the odd shape 1: output: 21 of 21 elements differ *",
    ),
    "a shape": (f"nki_kernel.check(scale, lambda a, f: a[:1], {INPUTS})", "*(128, 64) and the law's has (1, 64)*"),
    "all zero": ("nki_kernel.run(scale, 'float32:128x4', 0.0)", "*scale: output is all zero*"),
    "a fault": ("nki_kernel.run(scale, 'float32:300x4', 2.0)", "*TooManyPartitions*"),
}  # fmt: skip
LATENCIES = {
    "fast enough": ("@pytest.mark.nki_latency(max_us=20)", "nki_kernel.run(scale, 'float32:128x512', 2.0)", None),
    "only the ordinary inputs count": (
        "@pytest.mark.nki_latency(max_us=6)",
        "nki_kernel.check(scale, law, ['float32:128x64', 2.0], odd=[['float32:128x8192', 2.0]], hostile=())",
        None,
    ),
    "too slow": (
        "@pytest.mark.nki_latency(max_us=4)",
        "nki_kernel.run(scale, 'float32:128x8192', 2.0)",
        "scale takes * us (simulated on trn2, without a launch; possible * us to * us) and max_us is 4; its critical *",
    ),
    "no run": ("@pytest.mark.nki_latency(max_us=4)", "pass", "the test is marked nki_latency and ran no kernel *"),
    "no limit": ("@pytest.mark.nki_latency(4)", "pass", "nki_latency takes max_us=MICROSECONDS and nothing else"),
    "a broken test": ("@pytest.mark.nki_latency(max_us=4)", "assert False, 'its own failure'", "*its own failure*"),
}


def ran(pytester: pytest.Pytester, body: str, mark: str = "", *options: str) -> pytest.RunResult:
    pytester.makepyfile(f"{KERNELS}\n{mark}\ndef test_it(nki_kernel):\n    {body}\n")
    loaded = ("-p", "no:cacheprovider", "--strict-markers", "-p", "nkisim.pytest_plugin")
    return pytester.runpytest_inprocess(*loaded, *options)


@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str, pytester: pytest.Pytester) -> None:
    ran(pytester, PASSES[name]).assert_outcomes(passed=1)


@pytest.mark.parametrize("name", FAILS)
def test_fails(name: str, pytester: pytest.Pytester) -> None:
    body, sentence = FAILS[name]
    result = ran(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([sentence])


@pytest.mark.parametrize("name", LATENCIES)
def test_latency(name: str, pytester: pytest.Pytester) -> None:
    mark, body, sentence = LATENCIES[name]
    result = ran(pytester, body, mark)
    result.assert_outcomes(passed=int(sentence is None), failed=int(sentence is not None))
    if sentence:
        result.stdout.fnmatch_lines([sentence])


@pytest.mark.parametrize(("options", "version"), [((), "0.6.0"), (("--nki", "0.7"), "0.7.0")])
def test_the_version_is_an_option(options: tuple[str, ...], version: str, pytester: pytest.Pytester) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        ran(pytester, f"assert nki.__version__ == {version!r}", "", *options).assert_outcomes(passed=1)
        assert VARIABLE not in os.environ
