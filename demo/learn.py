"""Learning steps: next-token loss, distillation from the target, and text the target samples."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import DynamicCache, Qwen3ForCausalLM

from demo.muon import Muon

WARMUP_SHARE, FINAL_SHARE = 0.04, 0.03


@dataclass(frozen=True)
class Rates:
    """Peak learning rates: Muon for hidden matrices, AdamW for embeddings, head and norms."""

    muon: float
    adamw: float


class Learner:
    """A model with its optimizers and cosine schedules; lives for all stages of its training."""

    def __init__(self, model: Qwen3ForCausalLM, rates: Rates, steps: int) -> None:
        self.model = model
        hidden = [w for w in model.model.layers.parameters() if w.ndim == 2]
        taken = {id(w) for w in hidden}
        others = [w for w in model.parameters() if id(w) not in taken]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(hidden, lr=rates.muon, weight_decay=0.1),
            torch.optim.AdamW(others, lr=rates.adamw, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: cosine_share(step, steps)) for o in self.optimizers
        ]

    def step(self, ids: torch.Tensor, teacher_logits: torch.Tensor | None = None) -> float:
        """One update on ids [B, S]; distils when teacher logits [B, S, V] are given."""
        self.model.train()
        logits = self.model(ids).logits
        if teacher_logits is None:
            loss = next_token_loss(logits, ids)
        else:
            loss = distillation_loss(logits, teacher_logits)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.item()


def cosine_share(step: int, steps: int) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to a small share."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of ids [B, S] given logits [B, S, V]."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft) in nats over all positions."""
    log_draft = functional.log_softmax(logits.flatten(0, 1), dim=-1)
    log_target = functional.log_softmax(teacher_logits.flatten(0, 1), dim=-1)
    return functional.kl_div(log_draft, log_target, log_target=True, reduction="batchmean")


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> float:
    """Next-token loss in nats, without learning."""
    model.train(False)
    return next_token_loss(model(ids).logits, ids).item()


@torch.no_grad()
def continued(
    model: Qwen3ForCausalLM, prompts: torch.Tensor, new: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Prompts [B, S] with `new` more ids each: sampled, or greedy when there is no generator."""
    cache, ids, step = DynamicCache(), prompts, prompts
    for _ in range(new):
        logits = model(step, past_key_values=cache, use_cache=True).logits[:, -1]
        if generator is None:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, step], dim=1)
    return ids


def own_text(
    model: Qwen3ForCausalLM, source: Iterator[torch.Tensor], batches: int, length: int, seed: int
) -> Iterator[torch.Tensor]:
    """Batches [B, length] that the target wrote itself, greedy and sampled in turn."""
    generator = torch.Generator().manual_seed(seed)
    for n in range(batches):
        prompt_tokens = (8, 16, 32)[n % 3]
        prompts = next(source)[:, :prompt_tokens]
        sampler = generator if n % 2 else None
        yield continued(model, prompts, length - prompt_tokens, sampler)
