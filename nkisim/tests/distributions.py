"""`python tests/distributions.py FOLDER`: checks the metadata and the files of an sdist and a wheel."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

# folders that only the sdist has
SOURCES = ("docs", "examples", "tests", "validation")


def check(sdist: Path, wheel: Path) -> str:
    """A sentence about the two.

    Raises:
        ExceptionGroup: metadata are not valid (PEP 566, 639, 685).
        ValueError: the metadata differ, or a folder is missing, or is in the wheel.
    """
    with tarfile.open(sdist) as archive, zipfile.ZipFile(wheel) as members:
        root = sdist.name.removesuffix(".tar.gz")
        files = {name.partition("/")[2] for name in archive.getnames()}
        information = archive.extractfile(f"{root}/PKG-INFO")
        assert information
        names = members.namelist()
        (path,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        texts = [information.read(), members.read(path)]
    first, second = (Metadata.from_email(text, validate=True) for text in texts)
    if (first.name, first.version, first.requires_dist) != (second.name, second.version, second.requires_dist):
        raise ValueError(f"{sdist.name} and {wheel.name} have different metadata; build both anew")
    if missing := [folder for folder in SOURCES if not any(file.startswith(f"{folder}/") for file in files)]:
        raise ValueError(f"{sdist.name} has no {', '.join(missing)}; MANIFEST.in lists the folders")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        raise ValueError(f"{wheel.name} has no LICENSE; it must be a file of this folder")
    if others := sorted({name.partition("/")[0] for name in names} - {"nkisim", path.partition("/")[0]}):
        raise ValueError(f"{wheel.name} has {', '.join(others)}; it may have the package only")
    return f"{first.name} {first.version}: metadata are valid; sdist of {len(files)} files, wheel of {len(names)}"


if __name__ == "__main__":
    (source,), (built,) = (list(Path(sys.argv[1]).glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    print(check(source, built))
