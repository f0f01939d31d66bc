"""How the committed texts in demo/text were made from three Debian packages (not needed to train).

`apt-get download dict-devil dict-jargon r-cran-janeaustenr`, then for each of the three files
`dpkg-deb -x FILE unpacked`, then `python -m demo.text_sources unpacked`.
"""

import argparse
import gzip
import re
import struct
import zlib
from pathlib import Path

TEXT = Path(__file__).parent / "text"
DICTD = "usr/share/dictd"
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
KEPT_NOVELS = {"EMMA": "emma", "PRIDE AND PREJUDICE": "pride", "Persuasion": "persuasion"}
JARGON_CHARS = 700_000
CHARACTER_VECTOR, CHARACTER_STRING = 16, 9


def novels(database: bytes) -> list[str]:
    """The character vectors in an R lazy-load database, lines joined by newlines."""
    texts, offset = [], 0
    while offset < len(database):
        inflate = zlib.decompressobj()
        texts.append(_character_vector(inflate.decompress(database[offset + 4 :])))
        offset = len(database) - len(inflate.unused_data)
    return texts


def _character_vector(xdr: bytes) -> str:
    start = xdr.index(struct.pack(">I", CHARACTER_VECTOR))
    (count,) = struct.unpack_from(">I", xdr, start + 4)
    offset, lines = start + 8, []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", xdr, offset)
        assert flags & 0xFF == CHARACTER_STRING
        lines.append(xdr[offset + 8 : offset + 8 + length].decode("utf-8"))
        offset += 8 + length
    return "\n".join(lines)


def unwrapped(text: str, margin: str = "") -> str:
    """One line per paragraph; verse (indented beyond the margin) keeps its lines."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.removeprefix(margin).rstrip() for line in block.split("\n")]
        verse = any(line.startswith("  ") for line in lines[1:])
        joined = "\n".join(lines) if verse else re.sub(r"\s+", " ", " ".join(lines))
        if joined.strip():
            paragraphs.append(joined.strip("\n") if verse else joined.strip())
    return "\n".join(paragraphs) + "\n"


def write(name: str, text: str) -> None:
    """The text as gzip without a time stamp, so that the same text is the same file."""
    (TEXT / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    """Read the unpacked packages, write demo/text/*.txt.gz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("unpacked", type=Path, help="where the packages were unpacked")
    unpacked = parser.parse_args().unpacked
    TEXT.mkdir(exist_ok=True)
    for novel in novels((unpacked / NOVELS).read_bytes()):
        title = novel.split("\n", 1)[0].strip()
        if title in KEPT_NOVELS:
            write(KEPT_NOVELS[title], unwrapped(novel))
    for name, first, margin in (("devil", "ABASEMENT, n.", ""), ("jargon", "(TM)\n", "    ")):
        text = gzip.decompress((unpacked / DICTD / f"{name}.dict.dz").read_bytes()).decode()
        text = text[text.index(first) :]
        write(name, unwrapped(text[:JARGON_CHARS], margin))


if __name__ == "__main__":
    main()
