"""The witness itself: who counts as the vendor's nki, what counts as agreement, and the vendor where it is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import draw, on_device
from nkisim.install import install
from validation import witness
from validation.stand_in import package

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/witness.md"
X = draw((8, 5), seed=3)
# bound at import, not read from `nl` when the kernel runs
ADD = nl.add


def double(dst: Any, x: Any) -> None:
    nisa.tensor_tensor(dst=dst, data1=x, data2=x, op=nl.add)


def observed(other: Any, body: Callable[..., None] = double) -> witness.Witness:
    seen = witness.Witness(other)
    witness.ACTIVE.append(seen)
    try:
        on_device(body, (X,), [(X.shape, "float32")])
    finally:
        witness.ACTIVE.remove(seen)
    return seen


def test_equal_bits_are_counted_and_the_names_come_back() -> None:
    seen = observed(package())
    assert seen.exact == 1
    assert seen.tally["tensor_tensor"] == Counter(equal=1)
    assert globals()["nisa"] is sys.modules["nkisim.isa"]


def test_another_result_is_an_error() -> None:
    def wrong(dst: Any, data1: Any, data2: Any, op: Any) -> None:
        nisa.tensor_scalar(dst=dst, data=data1, op0=nl.multiply, operand0=2.01)

    with pytest.raises(AssertionError, match="differ by"):
        observed(package(tensor_tensor=wrong))


def test_a_function_of_nkisim_is_not_passed_to_the_other_package() -> None:
    def mixed(dst: Any, x: Any) -> None:
        nisa.tensor_scalar(dst=dst, data=x, op0=ADD, operand0=1.0)

    with pytest.raises(TypeError, match="add is a function of nkisim"):
        observed(package(), mixed)


@pytest.mark.slow
def test_the_page_lists_the_instructions_that_a_run_compares(tmp_path: Path) -> None:
    """The run of `make witness`, with nkisim in the vendor's place."""
    recipe = re.search(r"(tests/\S.*) --witness ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe
    page = tmp_path / "page.md"
    options = [*recipe[1].split(), "--witness", "--witness-stand-in", "--witness-page", str(page)]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    listed = [re.findall(r"^\| `(\w+)` \|", file.read_text(encoding="utf-8"), re.M) for file in (page, PAGE)]
    assert listed[0] == listed[1]
    assert len(listed[0]) > 40


def test_a_look_alike_is_not_the_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert witness.vendor() is None
    assert install()
    assert not witness.is_real(ModuleType("nki"))


def test_the_vendor_agrees() -> None:
    result = witness.vendor()
    if result is None:
        pytest.skip(witness.ABSENT)
    assert observed(result).exact == 1
