"""Ctrl-C ends a command with one sentence."""

import signal

import pytest

from model.errors import UserError, run_cli


@pytest.mark.parametrize("error", [ValueError, OSError, UserError])
def test_ctrl_c_ends_the_command_with_one_sentence(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    """Also if a library converts it to another error, as safetensors does in a slice."""

    def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error("could not determine the shape of an object") from None

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted: run the command again to continue from the finished files\n"
