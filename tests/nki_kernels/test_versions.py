"""Every kernel: in the package's README, table, tests, benchmark; and unmodified in both versions of NKI."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import nki
import pytest

import nki_kernels
import nkisim
from bench.kernels.cases import CASES
from model.nki.table import KERNELS
from nkisim.lint import lint
from tests.nki_kernels import test_recorded, test_refusals
from tests.nki_kernels.attention import inputs, test_prompt, test_verify
from tests.nki_kernels.layer import test_attention, test_layers, test_mlp, test_prompt_matmul
from tests.nki_kernels.layer.inputs import AttentionDims
from tests.nki_kernels.sampling import test_draw_and_accept, test_noise
from tests.nki_kernels.sampling.inputs import Dims

PACKAGE = Path(nki_kernels.__file__).parent
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
# what only the device check launches: tests/compile/test_device_check.py
PROBES = {"psum_chains_kernel", "sum_over_ranks_kernel"}
# a small launch of every kernel, by the test that holds it against its law
LAWS: dict[str, Callable[[], None]] = {
    "accept_drafts": lambda: test_draw_and_accept.test_accept(3, 5, 7),
    "append_rows": lambda: test_prompt.test_rows_that_are_appended(1),
    "coupled_sample": lambda: test_draw_and_accept.test_shard(Dims(5, 333, 7), 2),
    "decode_attention": lambda: test_attention.test_law_and_model(AttentionDims(2, 3, 256, 3, 3, 96), "fp32", 1),
    "decode_layers": lambda: test_layers.test_sums_over_ranks(2, 1),
    "decode_mlp": lambda: test_mlp.test_law((3, 384, 250), "bf16", 2),
    "gumbel_noise": lambda: test_noise.test_noise(Dims(5, 333, 7), 2),
    "prompt_attention": lambda: test_prompt.test_as_exact_as_the_model((1, 1), 1024, 64, 0, 128, "fp32", 1),
    "prompt_mlp": lambda: test_prompt_matmul.test_mlp_has_decode_s_bits((1, 256, 96), "bf16"),
    "prompt_product": lambda: test_prompt_matmul.test_products_of_all_layouts(1, 256, "bf16"),
    "verify_attention": lambda: test_verify.test_as_exact_as_the_model(inputs.Dims(2, 2, 1, 3, 140, 64), 2),
    "weights_above": lambda: test_draw_and_accept.test_weights_above(Dims(5, 333, 7), 2),
}


def rows() -> dict[str, list[str]]:
    """The cells of the README's table, by kernel."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in cells}


def jitted() -> dict[str, Path]:
    """Every function of the package that nki.jit decorates, and its file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "nki.jit" for d in node.decorator_list):
                found[node.name] = path
    return found


def test_no_kernel_is_missing() -> None:
    names = {f"{name}_kernel" for name in KERNELS}
    assert set(jitted()) == names | PROBES
    assert set(rows()) == set(KERNELS) == set(LAWS) == set(test_refusals.GOOD)
    assert {case.kernel.fn.__name__ for case in CASES} == names
    assert {bad[0] for bad in test_refusals.BAD} == set(KERNELS)
    # bits on one core and on two
    recorded = {(kernel, lnc) for kernel, _, lnc in test_recorded.CASES.values()}
    assert recorded == {(name, lnc) for name in KERNELS for lnc in (1, 2)}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_a_card_a_law_and_a_file(name: str) -> None:
    _, law, _, _, file = rows()[name]
    kernel = KERNELS[name]
    assert kernel.fn.__name__ == f"{name}_kernel"
    assert jitted()[f"{name}_kernel"] == PACKAGE / file.strip("`")
    module = importlib.import_module(kernel.fn.__module__)
    assert callable(getattr(module, name))
    assert all(word in (module.__doc__ or "") for word in ("Layouts:", "Cost:", "Launched by"))
    for path, function in re.findall(r"`(\w+\.law)\.(\w+)`", law):
        assert callable(getattr(importlib.import_module(f"nki_kernels.{path}"), function))


@pytest.mark.parametrize("name", LAWS)
def test_a_kernel_runs_where_python_traces_it(name: str) -> None:
    with nkisim.using(nkisim.Policy(nki="0.7")):
        assert nki.__version__ == "0.7.0"
        LAWS[name]()


@pytest.mark.parametrize("version", ["0.6", "0.7"])
def test_the_linter_has_no_finding(version: str) -> None:
    assert lint([PACKAGE], version) == ([], len(KERNELS) + len(PROBES))


def undeclared(sources: Iterable[str]) -> set[str]:
    """Attributes that are assigned somewhere and declared in no `__init__`."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]

    def assigned(part: Iterable[ast.AST]) -> set[str]:
        return {n.attr for n in part if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}

    inits = [n for node in nodes if getattr(node, "name", "") == "__init__" for n in ast.walk(node)]
    return assigned(nodes) - assigned(inits)


def test_every_attribute_is_declared() -> None:
    """What kernels carry has its line in a class's `__init__`, whichever file assigns it."""
    assert not undeclared(path.read_text() for path in PACKAGE.rglob("*.py"))
    # negative control
    declared = "class Pack:\n    def __init__(self):\n        self.limit = None\n"
    assert undeclared([declared, "def load(pack):\n    pack.limit = pack.zero = 0\n"]) == {"zero"}
