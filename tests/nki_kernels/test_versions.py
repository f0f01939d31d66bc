"""Our kernels, unmodified, in the version of NKI that Python runs: each against its law, and the linter has no word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import nki
import pytest

import nki_kernels
import nkisim
from nkisim.lint import lint
from nkisim.pytest_plugin import KernelRuns
from tests.nki_kernels.attention import test_merge, test_prompt, test_verify
from tests.nki_kernels.attention.inputs import Dims as Slots
from tests.nki_kernels.layer import test_attention, test_layers, test_mlp, test_prompt_matmul
from tests.nki_kernels.layer.inputs import AttentionDims
from tests.nki_kernels.sampling import test_draw_and_accept, test_noise, test_weights_above
from tests.nki_kernels.sampling.inputs import Dims

# a small launch of every kernel, by the test that holds it against its law
LAUNCHES: dict[str, Callable[[], None]] = {
    "verify": lambda: test_verify.test_as_exact_as_the_textbook(Slots(3, 2, 1, 3, 257, 128), 2),
    "verify paged": lambda: test_verify.test_blocks_as_exact_as_the_textbook(Slots(3, 3, 3, 4, 520, 64), 1),
    "append": lambda: test_prompt.test_rows_that_are_appended(1),
    "merge": lambda: test_merge.test_law(KernelRuns(), 3, 131, 64, 2),
    "mlp": lambda: test_mlp.test_law((3, 384, 250), "bf16", 2),
    "attention": lambda: test_attention.test_law_and_model(AttentionDims(2, 3, 256, 3, 3, 96), "fp32", 1),
    "layers": lambda: test_layers.test_sums_over_ranks(2, 1),
    "prompt": lambda: test_prompt.test_as_exact_as_the_model((1, 1), 1024, 64, 0, 128, "fp32", 1),
    "prompt mlp": lambda: test_prompt_matmul.test_mlp_has_decode_s_bits((1, 256, 96), "bf16"),
    "prompt product": lambda: test_prompt_matmul.test_products_of_all_layouts(1, 256, "bf16"),
    "accept": lambda: test_draw_and_accept.test_accept(3, 5, 7),
    "noise": lambda: test_noise.test_noise(Dims(5, 333, 7), 2),
    "draw": lambda: test_draw_and_accept.test_shard(Dims(5, 333, 7), 2),
    "weights above": lambda: test_weights_above.test_law(Dims(5, 333, 7), 2),
}


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    with nkisim.using(nkisim.Policy(nki="0.7")):
        yield


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_runs(name: str) -> None:
    assert nki.__version__ == "0.7.0"
    LAUNCHES[name]()


def test_the_linter_has_no_word_and_no_kernel_is_missing() -> None:
    assert lint([Path(nki_kernels.__file__).parent], "0.7") == ([], len(LAUNCHES))
