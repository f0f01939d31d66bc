"""Checks the tokenizers of a build: the ids of the target's are the model's, and a draft's are the same."""

from pathlib import Path

from tokenizers import Tokenizer

from model.config import read_file, read_object
from model.errors import UserError
from trnspec.bundle.tokenizer import tokenizer_fault


def check_tokenizers(target: Path, vocab_size: int, draft: Path | None = None) -> None:
    """Raise UserError if a tokenizer file is missing or cannot be used, or a draft's ids are not the target's."""
    contents = [_checked(folder, vocab_size) for folder in (target, draft) if folder]
    vocabularies = [Tokenizer.from_str(content.decode()).get_vocab() for content in dict.fromkeys(contents)]
    if vocabularies[1:] and vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"the tokenizers of {target} and {draft} differ; a draft must have the target's: give one that was "
            "trained for it"
        )
    if (config := target / "tokenizer_config.json").is_file():
        read_object(config)
    if (template := target / "chat_template.jinja").is_file():
        try:
            read_file(template).decode()
        except ValueError as error:
            raise UserError(f"{template} is not text ({error}); download the checkpoint again") from error


def _checked(folder: Path, vocab_size: int) -> bytes:
    """The content of a folder's tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder} has no tokenizer.json; save it there with transformers' AutoTokenizer")
    content = read_file(file)
    if clause := tokenizer_fault(content, vocab_size):
        raise UserError(f"{file} {clause}; give the tokenizer of this model")
    return content
