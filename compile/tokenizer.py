"""Checks that target and draft have one tokenizer: a draft proposes ids, and the target reads them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from model.errors import UserError


def same_tokenizer(target: Path, draft: Path) -> None:
    """Refuse a pair whose tokenizer.json differ; a folder without one is refused too."""
    contents = []
    for folder in (target, draft):
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a checkpoint folder with its tokenizer")
        contents.append(file.read_bytes())
    if contents[0] != contents[1] and _vocabulary(contents[0], target) != _vocabulary(contents[1], draft):
        raise UserError(
            f"the tokenizers of {target} and {draft} differ; a draft must propose ids of the target's tokenizer"
        )


def _vocabulary(content: bytes, folder: Path) -> dict[str, int]:
    try:
        return dict(Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise UserError(f"{folder}/tokenizer.json cannot be read ({error}); fetch the checkpoint again") from error
