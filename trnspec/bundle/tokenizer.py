"""Checks of a tokenizer.json: its ids are the model's, and no text grows much in it."""

import json
import math
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from model.errors import UserError

TOKENIZER = "tokenizer/tokenizer.json"
# the parts of a tokenizer.json that change a text, and the largest factor by which they may lengthen it together
_STAGES, _MAX_GROWTH = ("normalizer", "pre_tokenizer", "post_processor", "decoder"), 16


def tokenizer_fault(content: bytes | bytearray, vocab_size: int) -> str:
    """Why a tokenizer.json cannot be used with a model of this size, as the end of a sentence; "" if it can."""
    try:
        text = content.decode("utf-8", errors="replace")
        last = max(call(call(Tokenizer.from_str, text).get_vocab, with_added_tokens=True).values(), default=-1)
    except UserError as error:
        return f"cannot be used: {error}"
    value = json.loads(text)
    if (growth := math.prod(_growth(value.get(stage)) for stage in _STAGES)) > _MAX_GROWTH:
        return f"lengthens a text up to {growth:.3g} times, at most {_MAX_GROWTH} times is supported"
    return "" if last < vocab_size else f"has the id {last}, the model's ids are 0 to {vocab_size - 1}"


def _growth(part: Any) -> float:
    """The largest factor by which a part of a tokenizer.json lengthens a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    match part.get("type"):
        case "Replace":
            # a regular expression may match between any two characters
            length = len(part["pattern"].get("String", ""))
            return max(1, len(part["content"]) / length) if length else 1 + len(part["content"])
        case "TemplateProcessing":
            return max(1, sum("Sequence" in piece for piece in part["single"]))
        case "Precompiled":
            # a table of strings of any length
            return math.inf
    return math.prod(map(_growth, part.values()))


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of the tokenizers library; its errors, panics of its Rust code included, become a UserError."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizers library failed ({ascii(str(error)[:120])[1:-1]})") from error
