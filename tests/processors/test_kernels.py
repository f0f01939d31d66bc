"""Simulated results are equal in their bits under every BLAS kernel and instruction set that can be forced here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processors.environments import Environment, kernel_environments, results

# OpenBLAS takes one kernel for several processors
KERNELS = {"Haswell": {"Haswell"}, "Zen": {"Zen", "Haswell"}, "SkylakeX": {"SkylakeX"}, "Nehalem": {"Nehalem"}}


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def test_a_row_has_its_bits_alone_and_among_others(kernels: dict[str, Any]) -> None:
    check_rows(kernels["digests"])


def check_rows(digests: dict[str, str]) -> None:
    """What is computed alone and among others is equal."""
    rows = {name.split(",")[0] for name in digests if ", alone" in name}
    assert len(rows) == 4
    assert not [row for row in rows if digests[f"{row}, alone"] != digests[f"{row}, among others"]]
    assert len({value for name, value in digests.items() if name.startswith("corner")}) == 1


@pytest.mark.parametrize("environment", kernel_environments(), ids=str)
def test_the_bits_of_instructions_and_kernels(environment: Environment, kernels: dict[str, Any]) -> None:
    if environment.why_not:
        pytest.skip(environment.why_not)
    forced = results(environment, "kernels")
    if kernel := environment.variables.get("OPENBLAS_CORETYPE"):
        assert forced["machine"]["blas"] in KERNELS[kernel]
    disabled = environment.variables.get("NPY_DISABLE_CPU_FEATURES", "").split()
    assert not set(disabled) & set(forced["machine"]["sets"])
    assert differing(forced["digests"], kernels["digests"]) == []
    check_rows(forced["digests"])


def test_a_different_number_has_a_different_digest(kernels: dict[str, Any]) -> None:
    """Negative control: digests tell results apart, and so does the comparison."""
    digests = kernels["digests"]
    assert len(set(digests.values())) >= len(digests) - 12
    assert differing(digests, digests | {"noise": "0"}) == ["noise"]
