"""Every command of `nkisim`: what it prints, and that every mistake is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nkisim
from nkisim import inputs
from nkisim.__main__ import COMMANDS, console, main
from nkisim.cli import times
from nkisim.inputs import HOSTILE, ArrayInput, BadInputWord

KERNELS = """
import nki, nki.isa as nisa, nki.language as nl

@nki.jit
def scale(a, factor=2.0, twice=False):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    x = nl.load(a)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=factor)
    if twice:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=x)
    return out

@nki.jit
def unwritten(a):
    return nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)

@nki.jit
def broken(a):
    return a.shape[7]

@nki.jit
def misnamed(a):
    nisa.tensor_copy(dst=a, src=a, dtype=nl.float32)

@nki.jit
def asserted(a):
    assert a.shape == [2, 2]

@nki.jit
def multiplied(a):
    nisa.register_alloc(2) * 64

@nki.jit
def newer(a):
    nisa.scalar_load(a)
    return a

LIMIT = 3
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_text(KERNELS, encoding="utf-8")
    return tmp_path


Ended = tuple[int, str, str]


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """The command as a user runs it, in this process: its code, stdout and stderr."""

    def call(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["nkisim", *words])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        with pytest.raises(SystemExit) as stopped:
            console()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return call


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_same_words_are_the_same_arrays() -> None:
    for values in inputs.VALUES:
        one, two = (ArrayInput("bfloat16", (5, 7), values, 3).array() for _ in range(2))
        assert one.tobytes() == two.tobytes()
    kinds = {v: ArrayInput("float32", (64, 8), v).array() for v in HOSTILE}
    assert np.isnan(kinds["nan"]).sum() == 1
    assert len(np.unique(kinds["equal"])) == 1
    assert 1e17 < np.abs(kinds["large"]).max() < 1e19
    assert 0 < np.abs(kinds["tiny"]).max() < 1e-15
    for dtype in ("float16", "float32", "bfloat16", "float8_e5m2"):
        large = ArrayInput(dtype, (16, 16), "large").array().astype(np.float64)
        assert np.isfinite((large**2).astype(ArrayInput(dtype, (1,)).array().dtype)).all()
    assert ArrayInput("int32", (50,), "below3").array().max() == 2


def test_words_of_a_launch() -> None:
    args, named = inputs.arguments(["float32:4x2", "b=int32:3:below5:9", "eps=1e-6", "(1, 2)", "y=None"], seed=10)
    assert args == (ArrayInput("float32", (4, 2), "normal", 10), (1, 2))
    assert named == {"b": ArrayInput("int32", (3,), "below5", 9), "eps": 1e-6, "y": None}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("float31:2", "of dtype 'float31'"),
        ("float32:2:huge", "cannot hold 'huge'"),
        ("int32:2:below0", "cannot hold 'below0'"),
        ("float32:", "neither an array nor a literal"),
        ("x=y", "neither an array nor a literal"),
    ],
)
def test_a_wrong_word_is_refused(word: str, sentence: str) -> None:
    with pytest.raises(BadInputWord, match=sentence):
        inputs.read(word)


def test_run_prints_what_comes_out(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "run", "k.py:scale", "float32:128x4:ones", "factor=3.0", "--out", "o.npz")
    assert text.startswith("output  float32 128x4  3 to 3, mean 3  sha256 ")
    assert (np.load("o.npz")["output"] == 3).all()
    (row,) = json.loads(printed(capsys, "run", "k.py:scale", "float32:128x4:zeros", "--json"))["outputs"]
    assert row["values"] == "0 to 0, mean 0, all zero"


@pytest.mark.parametrize(
    "words", ["scale float32:1x60000:ones factor=1 --target trn3", "newer int32:1x1:ones --nki 0.7"]
)
def test_target_and_version_are_options(words: str, kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 to 1, mean 1" in printed(capsys, "run", *f"k.py:{words}".split())


def test_time_is_the_same_without_numerics(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "time", "k.py:scale", "float32:128x512")
    for words in ("us simulated on trn2 (", "without a launch: likely ", "reordered ", "a launch adds 12.10 us in a "):
        assert words in text
    assert printed(capsys, "time", "k.py:scale", "float32:128x512", "--no-numerics") == text


def test_no_launch_is_in_a_time_and_each_output_states_it(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = ("k.py:scale", "float32:128x512")
    Path("base.json").write_text(printed(capsys, "time", *launch, "--json"), encoding="utf-8")
    base = json.loads(Path("base.json").read_text(encoding="utf-8"))
    (row,) = base["times"]
    assert base["launch"] == "not included"
    assert row["likely_low_ns"] < row["latency_ns"] < row["likely_high_ns"]
    assert row["order"] in ("program", "reordered")
    assert min(row[f"{part}_ns"] for part in ("launch", "profiled_launch", "host_dispatch")) > 0
    compare = ("report", *launch, "--against", "base.json")
    assert printed(capsys, *compare).endswith("\nsimulated on trn2, without a launch\n")
    assert "for trn2, not measured, without a launch." in printed(capsys, *compare, "--format", "markdown")
    for file, words in (("a.html", "simulated latency, without a launch"), ("a.svg", "simulated, no launch")):
        printed(capsys, "report", *launch, "--out", file)
        assert words in Path(file).read_text(encoding="utf-8")


def test_a_recording_becomes_the_same_picture(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "run", "k.py:scale", "float32:128x512", "--recording", "r.json")
    printed(capsys, "report", "r.json", "--out", "a.svg")
    printed(capsys, "report", "k.py:scale", "float32:128x512", "--out", "b.svg")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()
    printed(capsys, "report", "r.json", "--out", "a.html")
    assert "k.py:scale float32:128x512: simulated timeline" in Path("a.html").read_text(encoding="utf-8")
    printed(capsys, "trace", "r.json", "--out", "t.json")
    assert "traceEvents" in json.loads(Path("t.json").read_text(encoding="utf-8"))


def test_every_command_lists_its_arguments(ended: Callable[..., Ended]) -> None:
    code, listed, _ = ended()
    assert code == 0
    for name in COMMANDS:
        assert f"  {name} " in listed
        code, text, _ = ended(name, "--help")
        assert code == 0
        assert text.startswith(f"usage: nkisim {name} ")


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    root = Path(nkisim.__file__).parents[1]
    command = [sys.executable, "-m", "nkisim", "rnu"]
    done = subprocess.run(command, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no command 'rnu'")


WRONG = {
    "no such command": (["rnu"], "there is no command 'rnu'; the commands are run, time"),
    "no kernel": (["run"], "the following arguments are required: KERNEL"),
    "no colon": (["run", "k.py"], "'k.py' is no kernel; write FILE.py:FUNCTION"),
    "no file": (["run", "x.py:scale"], "x.py cannot be used (No such file"),
    "no function": (["run", "k.py:nope"], "k.py has no function 'nope'; its kernels are scale, unwritten,"),
    "an argument": (["run", "k.py:misnamed", "float32:2x2"], "tensor_copy got an unexpected keyword argument 'd"),
    "an assertion": (["run", "k.py:asserted", "float32:2x2"], "the kernel raised AssertionError (`assert a.shape"),
    "a register": (["run", "k.py:multiplied", "float32:2x2"], "the kernel raised TypeError (the VirtualRegister has"),
    "memory": (["run", "k.py:scale", "float32:1x53760", "--sbuf", "neuronx-cc"], "ndarray: tensor takes 215040 B per"),
    "times of trn3": (["time", "k.py:scale", "float32:2x2", "--target", "trn3"], "timeline: argument 'target=trn3' is"),
    "a list": (["run", "k.py:scale", "[1, 2]", "1.0"], "launch: a list is used as a tensor; pass a numpy or"),
    "bytes": (["run", "@bytes"], "bytes is no list of launches ('utf-8' codec"),
    "a deep recording": (["report", "deep.json", "--out", "x.html"], "deep.json is nested too deeply to be read; "),
    "deep times": (["report", "k.py:scale", "float32:2x2", "--against", "deep.json"], "deep.json is nested too deeply"),
    "deep signatures": (["coverage", "--signatures", "deep.json"], "deep.json is nested too deeply to be read; "),
    "no signatures": (["coverage", "--signatures", "k.json"], "k.json holds no signatures (KeyError: 'modules'); "),
    "not a function": (["run", "k.py:LIMIT"], "k.py has no function 'LIMIT'"),
    "no argument": (["run", "k.py:scale"], "k.py:scale: missing a required argument: 'a'; its arguments are a, factor"),
    "named twice": (["run", "k.py:scale", "a=1", "a=2"], "an argument is named twice"),
    "a law": (["run", "k.py:unwritten", "float32:2x2"], "launch: output reads 4 of 4 elements"),
    "its Python": (["run", "k.py:broken", "float32:2x2"], "the kernel raised IndexError (tuple index out of range) ["),
    "an older version": (["run", "k.py:newer", "int32:1x1"], "scalar_load came with NKI 0.7 and"),
    "cores": (["run", "k.py:scale", "float32:2x2", "--lnc", "3"], "argument --lnc: invalid choice: "),
    "not Python": (["run", "bad.py:f"], "bad.py cannot be imported (SyntaxError"),
    "no picture": (["report", "k.py:scale", "float32:2x2", "--out", "x.png"], "report writes --out FILE.html or"),
    "no times": (["report", "k.py:scale", "float32:2x2", "--against", "k.json"], "k.json is no file of times"),
    "not a recording": (["trace", "k.json", "--out", "t.json"], "the file says format None"),
    "an empty list": (["time", "@none.txt"], "none.txt names no launch"),
    "a list and more": (["time", "@none.txt", "float32:2x2"], "@none.txt names complete launches"),
    "two to run": (["run", "@two.txt"], "nkisim run takes one launch, and the file names 2"),
    "nothing to lint": (["lint", "nowhere"], "no such file or folder: nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence_and_one_object(name: str, kernels: Path, ended: Callable[..., Ended]) -> None:
    Path("bad.py").write_text("def f(:\n", encoding="utf-8")
    Path("k.json").write_text("{}", encoding="utf-8")
    Path("bytes").write_bytes(b"\x80\x81")
    Path("deep.json").write_text("[" * 100_000, encoding="utf-8")
    Path("none.txt").write_text("# nothing\n", encoding="utf-8")
    Path("two.txt").write_text("k.py:scale float32:2x2\nk.py:scale float32:2x2 --lnc 2\n", encoding="utf-8")
    words, sentence = WRONG[name]
    code, out, err = ended(*words, "--json")
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith(f"error: {sentence}")
    assert f"error: {json.loads(out)['message']}" == line


def test_an_error_for_programs_names_its_law_and_its_line(kernels: Path, ended: Callable[..., Ended]) -> None:
    facts = json.loads(ended("run", "k.py:unwritten", "float32:2x2", "--json")[1])
    assert (facts["error"], facts["op"], facts["operand"]) == ("UnwrittenRead", "launch", "output")
    facts = json.loads(ended("run", "k.py:misnamed", "float32:2x2", "--json")[1])
    assert (facts["error"], facts["op"]) == ("WrongCall", "tensor_copy")
    assert KERNELS.splitlines()[facts["line"] - 1].strip().startswith("nisa.tensor_copy(")
    Path("big.py").write_text(KERNELS.replace("nl.load(a)", "nl.ndarray((256, 4), dtype=nl.float32)"), encoding="utf-8")
    facts = json.loads(ended("run", "big.py:scale", "float32:2x2", "--json")[1])
    assert facts["error"] == "TooManyPartitions"
    assert facts["file"].endswith("big.py")
    assert KERNELS.splitlines()[facts["line"] - 1].strip() == "x = nl.load(a)"


def row(kernel: str, latency: float, **others: Any) -> dict[str, Any]:
    return {"kernel": kernel, "latency_ns": latency, "low_ns": 0.9 * latency, "high_ns": 1.2 * latency, **others}


def test_lint_names_the_line_that_is_not_python(kernels: Path, ended: Callable[..., Ended]) -> None:
    Path("bad.py").write_text("def f(:\n", encoding="utf-8")
    code, out, err = ended("lint", "bad.py")
    assert (code, err) == (1, "0 kernels, 1 refusals, 1 findings\n")
    assert out.startswith("bad.py:1:1: error: is not Python (")


def test_the_difference_of_two_files() -> None:
    base = [row("a", 1000.0), row("b", 2000.0), row("c", 50.0), row("gone", 1.0)]
    head = [row("a", 1000.0), row("b", 1500.0), row("c", 55.0), row("new", 7.0)]
    words = {r["kernel"]: times.verdict(r) for r in times.difference(base, head)}
    changes = {"a": "same", "b": "-25.0%, faster", "c": "+10.0%, slower, inside of the band"}
    assert words == {**changes, "gone": "gone", "new": "new"}


def test_version_names_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In lines and as JSON; a variable that forces a library is named where it is set."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    facts = json.loads(printed(capsys, "version", "--json"))
    assert facts["nkisim"] == nkisim.__version__
    assert facts["processor"]
    assert facts["BLAS kernels"]
    assert facts["numpy"].startswith(np.__version__)
    assert "OPENBLAS_CORETYPE" not in facts
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    lines = printed(capsys, "version").splitlines()
    assert set(lines) - {f"{name}: {fact}" for name, fact in facts.items()} == {"OPENBLAS_CORETYPE: Haswell"}
