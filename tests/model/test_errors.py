"""Every command ends in a sentence, Ctrl-C included, wherever it is met."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Ctrl-C inside of a library that makes an error of its own of it, as safetensors does of one inside of a slice
_IN_A_LIBRARY = """
import signal
from model.errors import UserError, run_cli

def main():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise {error}("could not determine the shape of an object") from None

run_cli(main)
"""


@pytest.mark.parametrize(
    "program", [_IN_A_LIBRARY.format(error=name) for name in ("ValueError", "OSError", "UserError")]
)
def test_ctrl_c_ends_the_command_with_one_sentence(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["interrupted: finished work is kept; run the command again to continue"]
