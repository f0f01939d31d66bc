"""The images: what is copied is there and is all that is installed, the server has no root, no secret is in."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
Stage = list[tuple[str, str]]


def stages() -> dict[str, Stage]:
    """The instructions of each stage by its name."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in (li for li in text.splitlines() if li and not li.startswith("#")):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest.split(" AS ")[1]] = here = [(word, rest)]
        elif found:
            here.append((word, rest))
    return found


def words(stage: str, instruction: str) -> list[str]:
    return [rest for word, rest in stages()[stage] if word == instruction]


@pytest.mark.parametrize("stage", ["tools", "server"])
def test_all_packages_of_the_install_are_copied_and_there(stage: str) -> None:
    copied = {source for rest in words(stage, "COPY") for source in rest.split()[:-1]}
    assert not [source for source in copied if not (ROOT / source).exists()]
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()}
    installed = {f for f in folders if any(fnmatch(f, name) for name in setup["packages"]["find"]["include"])}
    without_server = installed - ({"serve"} if stage == "tools" else set())
    assert without_server | {"nkisim"} <= copied


def test_the_server_is_pinned_and_has_no_root() -> None:
    (install,) = words("server", "RUN")
    script = "sh serve/install.sh /opt/server/bin/python ./nkisim '.[serve,sign]'"
    assert install == f"python -m venv /opt/server && {script}"
    script = (ROOT / "serve/install.sh").read_text(encoding="utf-8")
    assert "-c constraints-serve.txt" in script
    order = [word for word, _ in stages()["server"]]
    assert order.index("USER") > max(i for i, word in enumerate(order) if word in ("RUN", "COPY"))
    assert words("server", "USER") == ["1000:1000"]
    assert "/health" in words("server", "HEALTHCHECK")[0]
    assert words("server", "ENTRYPOINT") == ['["vllm", "serve"]']


def test_the_same_script_makes_the_environment_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "sh serve/install.sh $(SERVE)/bin/python -e ./nkisim -e '.[serve]'" in makefile


def test_no_image_holds_a_secret_or_changes_under_its_name() -> None:
    for stage, instructions in stages().items():
        named = " ".join(rest for word, rest in instructions if word in ("ENV", "ARG"))
        assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", named, re.IGNORECASE), stage
        base = instructions[0][1].split(" AS ")[0]
        assert base == "${BASE}" or re.search(r":\d", base), stage
