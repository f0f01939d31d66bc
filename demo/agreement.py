"""How a draft compares with the target at each position: greedy agreement, sampled acceptance."""

import torch
from transformers import Qwen3ForCausalLM

from demo.learn import continued, greedy


def greedy_ids(target: Qwen3ForCausalLM, ids: list[int], new: int, end: int) -> list[int]:
    """The target's greedy continuation of ids, up to and with the end id."""
    continuation = continued(target, torch.tensor([ids]), new, greedy)[0, len(ids) :].tolist()
    return continuation[: continuation.index(end) + 1 if end in continuation else new]


@torch.no_grad()
def agreements(draft: Qwen3ForCausalLM, ids: list[int], continuation: list[int]) -> list[bool]:
    """At each position of the continuation: is the draft's argmax the target's token?"""
    logits = draft(torch.tensor([ids + continuation])).logits[0]
    guesses = logits[len(ids) - 1 : -1].argmax(-1).tolist()
    return [guess == token for guess, token in zip(guesses, continuation, strict=True)]


@torch.no_grad()
def sampled_acceptance(
    target: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, text: torch.Tensor, start: int, end: int
) -> float:
    """Chance that a sampled candidate is accepted, averaged over the target's samples [B, S].

    At each position this is the sum over the vocabulary of min(target, draft) (Leviathan et al.
    2023, corollary 3.6). Positions after the end of a document do not count.
    """
    before = slice(start - 1, -1)
    of_target, of_draft = (m(text).logits[:, before].softmax(-1) for m in (target, draft))
    overlap = torch.minimum(of_target, of_draft).sum(-1)
    ended = text[:, start:].eq(end).int()
    counted = (ended.cumsum(1) - ended).eq(0)
    return overlap[counted].mean().item()


def accepted_runs(agree: list[bool], k: int) -> list[int]:
    """Accepted candidates of each round of chain speculation: a run of at most k, then the bonus.

    Exact for greedy decoding: while the draft agrees, its own text is the target's text.
    """
    runs, at = [], 0
    while at < len(agree):
        window = agree[at : at + k]
        run = window.index(False) if False in window else len(window)
        runs.append(run)
        at += run + 1
    return runs


def leading_hits(hits_AK: torch.Tensor) -> torch.Tensor:
    """How many drafts (A,) are accepted at each anchor: those before the first miss."""
    return hits_AK.int().cumprod(-1).sum(-1)
