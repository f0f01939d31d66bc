"""Checks the tokenizers of a build: the ids of the target's are the model's, and a draft's are the same."""

from pathlib import Path

from tokenizers import Tokenizer

from model.errors import UserError


def check_tokenizers(target: Path, ids: int, draft: Path | None = None) -> None:
    """Raise UserError if the target's tokenizer.json cannot be read or has ids from `ids` on, or a draft's differs.

    Without a draft there may be no tokenizer.
    """
    files = [folder / "tokenizer.json" for folder in (target, draft) if folder]
    for file in files if draft else ():
        if not file.is_file():
            raise UserError(f"{file.parent} has no tokenizer.json; give a checkpoint folder with its tokenizer")
    contents = {file: file.read_bytes() for file in files if file.is_file()}
    # equal files are read once
    vocabularies = list({content: _vocabulary(content, file) for file, content in contents.items()}.values())
    if vocabularies and (last := max(vocabularies[0].values(), default=0)) >= ids:
        raise UserError(f"{files[0]} has the id {last} and the model's vocab_size is {ids}; give the model's own")
    if vocabularies[1:] and vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"the tokenizers of {target} and {draft} differ; a draft must propose ids of the target's tokenizer"
        )


def _vocabulary(content: bytes, file: Path) -> dict[str, int]:
    try:
        return dict(Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise UserError(f"{file} cannot be read ({error}); fetch the checkpoint again") from error
