"""Byte-level BPE of 2048 entries in the style of Qwen's; no normalisation, so it is lossless."""

import itertools
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.corpus import END, Prose, documents

VOCAB = 2048
# Qwen's pattern: words with their space, single digits, runs of punctuation, runs of space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "bos_token": None,
    "unk_token": None, "model_max_length": 1024, "clean_up_tokenization_spaces": False, "add_prefix_space": False,
}  # fmt: skip


def train_tokenizer(prose: Prose, seed: int, structured_documents: int = 4000) -> Tokenizer:
    """Learn the merges from the trained prose and a sample of structured documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stream = documents(prose, "structured", random.Random(f"{seed}-tokenizer"))
    sample = itertools.islice(stream, structured_documents)
    lines = itertools.chain.from_iterable(prose.train)
    tokenizer.train_from_iterator(itertools.chain(lines, sample), trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
