"""How the first process ends by an error: a mistake is one sentence and status 2, anything else keeps its traceback."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from model.errors import UserError
from serve.folder import METRICS_VARIABLE
from serve.startup import DEBUG_VARIABLE, install_excepthook, report_to_parent, started

MISTAKES = {
    "ours": ("raise UserError('k is 9; it must be 7')", "k is 9; it must be 7"),
    **{f"ours, {name}": (f"try:\n    raise UserError('it is corrupt')\nexcept UserError as e:\n    raise OSError{of}",
                         "it is corrupt") for name, of in (("wrapped", " from e"), ("meanwhile", ""))},
    "port": ("raise OSError(98, 'Address already in use')", "the port is in use; end the server that listens on it, "
             "or give a different --port"),
    "an option of vLLM's": ("exec(\"raise ValueError('tokens (64) are few')\", {'__name__': 'vllm.engine.arg_utils'})",
                            "tokens (64) are few"),
    "of pydantic": ("class E(ValueError):\n    def errors(self): return [{'msg': 'Value error, tokens are  few'}]\n"
                    "exec('raise E', {'__name__': 'vllm.config', 'E': E})", "tokens are few"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()


def end(statement: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The status of a process that ends by a statement, and the lines of its stderr."""
    status = 1
    try:
        exec(statement, {"UserError": UserError, "started": started})
    except Exception as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            status = int(str(ended.code))
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    statement, sentence = MISTAKES[mistake]
    assert end(statement, capsys) == (2, [f"error: {sentence}"])


def test_the_debug_variable_adds_the_traceback_before_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    status, lines = end("raise UserError('k is 9')", capsys)
    assert (status, lines[-1]) == (2, "error: k is 9")
    assert "Traceback" in lines[0]


@pytest.mark.parametrize(
    "statement", ["raise KeyError('a bug')", "raise ValueError('a bug')", "started()\nraise UserError('late')"]
)
def test_a_bug_has_its_traceback(statement: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = end(statement, capsys)
    assert status == 1
    assert "Traceback" in lines[0]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UserError("it is corrupt"), "it is corrupt"),
        (OSError(28, "No space left"), "the disk of this command is full; free some space and run the command again"),
    ],
)
def test_the_engine_s_mistake_is_the_first_process_s_sentence(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"), report_to_parent():
        raise error
    statement = "raise RuntimeError('Engine core initialization failed.')"
    assert end(statement, capsys) == (2, [f"error: {sentence}"])
    # the sentence is reported once
    assert end(statement, capsys)[0] == 1


def test_only_the_first_process_has_the_hook_and_the_debug_variable_raises_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()
    assert sys.excepthook is sys.__excepthook__
    with pytest.raises(UserError), report_to_parent():
        raise UserError("it is corrupt")
