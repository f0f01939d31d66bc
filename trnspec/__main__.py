"""`python -m trnspec COMMAND`: commands for a bundle and the machine that serves it."""

import sys

from model.errors import command_line, run_cli
from trnspec.certify import page

COMMANDS = {"certify": page.main}


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names."""
    parser = command_line("trnspec", "Commands for a bundle; each has a help text.", "certify bundles/demo")
    parser.add_argument("command", choices=COMMANDS, help="certify: compare a bundle's ids and log-probabilities")
    COMMANDS[parser.parse_args(arguments[:1]).command](arguments[1:])


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
