"""Every command ends in a sentence, Ctrl-C included, wherever it is met."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Ctrl-C that arrives while the garbage collector runs a callback, which cannot pass an exception on
_IN_A_CALLBACK = """
import gc, signal, time
from model.errors import run_cli

def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)

def main():
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)

run_cli(main)
"""


def test_ctrl_c_in_a_callback_ends_the_command_with_one_sentence() -> None:
    command = [sys.executable, "-c", _IN_A_CALLBACK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["interrupted: finished work is kept; run the command again to continue"]
