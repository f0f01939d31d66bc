"""How the first process ends by an error: a mistake is one sentence and status 2, anything else keeps its traceback."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import UserError
from serve.folder import METRICS_VARIABLE
from serve.startup import DEBUG_VARIABLE, install_excepthook, report_to_parent

_PROGRAM = """
import sys
from model.errors import UserError
from serve.startup import install_excepthook, started
install_excepthook()
{}
"""
MISTAKES = {
    "ours": ("raise UserError('k is 9; it must be 7')", "k is 9; it must be 7"),
    "ours, wrapped": (
        "try:\n    raise UserError('it is damaged')\nexcept UserError as e:\n    raise RuntimeError('failed') from e",
        "it is damaged",
    ),
    "ours, meanwhile": (
        "try:\n    raise UserError('it is damaged')\nexcept UserError:\n    raise RuntimeError('failed')",
        "it is damaged",
    ),
    "port": ("raise OSError(98, 'Address already in use')", "the port is in use; end the server that listens on it, "
             "or give a different --port"),
    "an option of vLLM's": (
        "exec(\"raise ValueError('tokens (64) are few')\", {'__name__': 'vllm.engine.arg_utils'})",
        "tokens (64) are few",
    ),
    "of pydantic": (
        "class E(ValueError):\n    def errors(self): return [{'msg': 'Value error, tokens are  few'}]\n"
        "exec('raise E', {'__name__': 'vllm.config', 'E': E})",
        "tokens are few",
    ),
}  # fmt: skip


def end(tmp_path: Path, statement: str, **environment: str) -> tuple[int, list[str]]:
    """The status of a process that ends by a statement, and the lines of its stderr."""
    variables = {k: v for k, v in os.environ.items() if k != DEBUG_VARIABLE} | {METRICS_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", _PROGRAM.format(statement)]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path: Path, mistake: str) -> None:
    statement, sentence = MISTAKES[mistake]
    assert end(tmp_path, statement) == (2, [f"error: {sentence}"])


def test_the_debug_variable_adds_the_traceback_before_it(tmp_path: Path) -> None:
    status, lines = end(tmp_path, "raise UserError('k is 9')", **{DEBUG_VARIABLE: "1"})
    assert status == 2
    assert "Traceback" in lines[0]
    assert lines[-1] == "error: k is 9"


@pytest.mark.parametrize(
    "statement", ["raise KeyError('a bug')", "raise ValueError('a bug')", "started()\nraise ValueError('a bug')"]
)
def test_a_bug_keeps_its_traceback(tmp_path: Path, statement: str) -> None:
    status, lines = end(tmp_path, statement)
    assert status == 1
    assert "Traceback" in lines[0]


@pytest.mark.parametrize("error", [UserError("it is damaged"), OSError(28, "No space left on device")])
def test_the_engine_s_mistake_is_the_first_process_s_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended, report_to_parent():
        raise error
    assert ended.value.code == 2
    sentence = "the disk of this command is full; free some space and run the command again"
    expected = "it is damaged" if isinstance(error, UserError) else sentence
    statement = "raise RuntimeError('Engine core initialization failed.')"
    assert end(tmp_path, statement) == (2, [f"error: {expected}"])
    # the sentence is reported once
    assert end(tmp_path, statement)[0] == 1


def test_only_the_first_process_has_the_hook_and_the_debug_variable_keeps_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    before = sys.excepthook
    install_excepthook()
    assert sys.excepthook is before
    with pytest.raises(UserError), report_to_parent():
        raise UserError("it is damaged")
