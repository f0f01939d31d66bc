"""Checks of a tokenizer.json: its ids are the model's, and it lengthens no text."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from model.errors import UserError

TOKENIZER = "tokenizer/tokenizer.json"
# the parts of a tokenizer.json that change a text
_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def tokenizer_fault(content: bytes | bytearray, vocab_size: int) -> str:
    """Why a tokenizer.json cannot be used with a model of this size, as the end of a sentence; "" if it can."""
    try:
        text = content.decode("utf-8", errors="replace")
        last = max(call(call(Tokenizer.from_str, text).get_vocab, with_added_tokens=True).values(), default=-1)
    except UserError as error:
        return f"cannot be used: {error}"
    if any(_lengthens(json.loads(text).get(stage)) for stage in _STAGES):
        return "can lengthen a text, whose memory and time then have no bound"
    return "" if last < vocab_size else f"has the id {last}, the model's ids are 0 to {vocab_size - 1}"


def _lengthens(part: Any) -> bool:
    """Whether a part of a tokenizer.json can lengthen a text by more than a constant."""
    if isinstance(part, list):
        return any(map(_lengthens, part))
    match part:
        case {"type": "Replace", "pattern": pattern, "content": content}:
            # a regular expression may match between any two characters
            return len(content) > len(pattern.get("String", ""))
        case {"type": "TemplateProcessing", "single": parts}:
            return sum("Sequence" in part for part in parts) > 1
    # Precompiled is a table of strings
    return isinstance(part, dict) and (part.get("type") == "Precompiled" or any(map(_lengthens, part.values())))


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of the tokenizers library; its errors, panics of its Rust code included, become a UserError."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizers library failed ({ascii(str(error)[:120])[1:-1]})") from error
