"""Drafts from a request's ids: the ids that followed the same ids at their last occurrence.

Prompt lookup as in vLLM (vllm/v1/spec_decode/ngram_proposer.py) and transformers (PromptLookupCandidateGenerator):
the longest ending that occurs earlier, the first of several as long, and the ids after it.
"""

from collections.abc import Sequence

import numpy as np

# an ending of one id says little, and more than eight add nothing
SHORTEST, LONGEST = 2, 8


def propose(ids: Sequence[int], k: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """At most k ids that may follow; none where no ending of at least `shortest` ids occurs earlier."""
    text = np.asarray(ids)
    # alike[e]: the last ids before place e, as many as were compared, are the last ones of all
    alike, lengths = np.ones(len(text), dtype=bool), np.zeros(len(text), dtype=np.int64)
    for back in range(1, min(longest, len(text) - 1) + 1):
        alike[:back] = False
        alike[back:] &= text[:-back] == text[-back]
        lengths += alike
    if not len(text) or lengths.max() < shortest:
        return []
    place = int(lengths.argmax())
    return text[place : place + k].tolist()
