"""The package `trnspec`: its exports, a foreign package of its name, the README's first lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomllib
from setuptools import build_meta

import trnspec

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {"model", "compile", "nki_kernels", "trnspec", "serve"}
# files that would make a package of our name of a folder
DECOYS = ["model/__init__.py", "compile.py", "nkisim/__init__.py"]
# folders of compile that the wheel leaves out
OF_A_CHECKOUT = {"device_check", "xla_check"}


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with the project on its path."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'nkisim/src'}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_promised_name_is_there_and_no_other() -> None:
    assert all(getattr(trnspec, name).__name__ == name for name in trnspec.__all__)
    with pytest.raises(AttributeError, match="trnspec has no 'LLMs'; it has LLM"):
        trnspec.LLMs  # noqa: B018


def test_importing_it_wakes_neither_torch_nor_jax(tmp_path: Path) -> None:
    heavy = _run(tmp_path, "-c", "import sys, trnspec; print(sorted({'torch', 'jax', 'numpy'} & sys.modules.keys()))")
    assert heavy.stdout.strip() == "[]"


def test_the_readme_s_first_lines_run(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(first.splitlines()) <= 8
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles/demo").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    exec(first, names := dict[str, Any]())
    assert capsys.readouterr().out.startswith(names["out"].text)
    assert len(names["out"].text) > 10


def test_a_folder_of_our_name_that_is_no_package_is_in_nobody_s_way(tmp_path: Path) -> None:
    for decoy in DECOYS:
        (tmp_path / decoy).parent.mkdir(exist_ok=True)
    assert _run(tmp_path, "-c", "from trnspec import Params").returncode == 0


@pytest.mark.parametrize("decoy", DECOYS)
def test_a_foreign_package_of_our_name_is_one_sentence(tmp_path: Path, decoy: str) -> None:
    (tmp_path / decoy).parent.mkdir(exist_ok=True)
    (tmp_path / decoy).write_text("raise SystemExit('imported')\n", encoding="utf-8")
    name = decoy.split("/", maxsplit=1)[0].removesuffix(".py")
    expected = f"Python finds the package '{name}' at {tmp_path / decoy}, and trnspec needs the one in {ROOT}; "
    imported = _run(tmp_path, "-c", "from trnspec import LLM")
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: {expected}")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/manifest.json").write_text('{"format": "trnspec-bundle"}', encoding="utf-8")
    for argument, code, out, error in (("bundle", 2, "", f"error: {expected}"), ("gpt2", 0, "None\n", "")):
        served = _run(tmp_path, "-c", "import trnspec; print(trnspec.platform())", "serve", argument)
        assert (served.returncode, served.stdout) == (code, out)
        assert served.stderr.startswith(error)


def test_the_wheel_ships_exactly_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by the backend from the sources and stray folders next to them; nothing is downloaded."""
    for name in (*SHIPPED, "bench", "demo", "deploy", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    for stray in ("models", "compile_old", "model_old"):
        (tmp_path / stray).mkdir()
        (tmp_path / stray / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    names = set(zipfile.ZipFile(tmp_path / build_meta.build_wheel(str(tmp_path))).namelist())
    packages = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in packages} == SHIPPED
    sources = {
        p.relative_to(ROOT).as_posix()
        for folder in SHIPPED
        for p in (ROOT / folder).rglob("*")
        if (p.suffix == ".py" or p.name == "py.typed" or p.suffix == ".json") and not {*p.parts} & OF_A_CHECKOUT
    }
    assert packages == sources
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in listed["find"]["include"]} == SHIPPED
