"""`python docs/console.py`: write the output of every console block of README and docs anew, by its own commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from nkisim import command
from nkisim.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*.md"))]
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
_STEP = re.compile(r"^\$ (nkisim .*)\n((?:(?!\$ ).*\n)*)", re.M)
_FILE = re.compile(r"^```python\n# (\w+\.py)\n.*?^```", re.M | re.S)


def printed(line: str) -> str:
    """What one command `nkisim ...` prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(SystemExit):
            command.run(lambda: main(shlex.split(line)[1:]))
    return out.getvalue()


def rewritten(text: str) -> str:
    """A page with the output of its commands, run next to its Python files and the examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        for file in _FILE.finditer(text):
            body = file.group(0).split("\n", 1)[1].removesuffix("```")
            (Path(folder) / file.group(1)).write_text(body, encoding="utf-8")
        os.chdir(folder)
        try:
            return _BLOCK.sub(lambda b: _STEP.sub(lambda s: f"$ {s[1]}\n{printed(s[1])}", b.group(0)), text)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
