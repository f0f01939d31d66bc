"""Command-line parsers and types of options, which refuse a value before any work begins."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path


def count(minimum: int = 1, maximum: int = 10**9) -> Callable[[str], int]:
    """A whole number from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 10 and minimum <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} was given; give a number from {minimum} to {maximum}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} was given; give a number above 0")
    return value


def output_file(text: str) -> Path:
    """A regular file that can be written, or a new file in an existing folder."""
    path = Path(text)
    existed = path.exists()
    try:
        if existed and not path.is_file():
            raise OSError("it is not a regular file")
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        what = f"{text[:200]} cannot be written ({error.strerror or error})"
        raise argparse.ArgumentTypeError(f"{what}; give a file in a writable folder") from None
    if not existed:
        path.unlink()
    return path


def vllm_command(text: str) -> Path:
    """The executable `vllm` of an environment."""
    path = Path(text)
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text[:200]} is not an executable file; run make serve-environment")
    return path.absolute()


def server_url(text: str) -> str:
    """The address of an OpenAI-compatible server, without a trailing /v1."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} was given; give an address such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


def input_file(text: str) -> Path:
    """A regular file; a pipe could block."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text[:200]} is not a regular file; give a file")
    return path
