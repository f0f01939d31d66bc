"""Learning: optimizers and their schedule, the two losses, and text that a model writes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.progress import track
from torch.nn import functional
from transformers import DynamicCache, Qwen3ForCausalLM

WARMUP_SHARE, FINAL_SHARE = 0.04, 0.03
Choice = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rates:
    """Peak learning rates: Muon for hidden matrices, AdamW for embeddings, head and norms."""

    muon: float
    adamw: float


class Updates:
    """The optimizers of a model's weights and their cosine schedules; lives for all stages of its training."""

    def __init__(self, model: torch.nn.Module, hidden: Iterable[torch.nn.Parameter], rates: Rates, steps: int) -> None:
        self.weights = [w for w in model.parameters() if w.requires_grad]
        matrices = [w for w in hidden if w.ndim == 2]
        taken = {id(w) for w in matrices}
        others = [w for w in self.weights if id(w) not in taken]
        # updates as large as AdamW's (Moonlight, arXiv 2502.16982)
        muon = torch.optim.Muon(matrices, lr=rates.muon, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.optimizers: list[torch.optim.Optimizer] = [muon]
        if others:
            self.optimizers.append(torch.optim.AdamW(others, lr=rates.adamw, betas=(0.9, 0.95), weight_decay=0.0))
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: cosine_share(step, steps)) for o in self.optimizers
        ]

    def apply(self, loss: torch.Tensor) -> float:
        """One update against the gradient of this loss."""
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
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


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely ids [B, 1] of logits [B, V]."""
    return logits.argmax(-1, keepdim=True)


@dataclass(frozen=True)
class Sampler:
    """Draws ids [B, 1] of logits [B, V] from a generator."""

    generator: torch.Generator
    temperature: float = 1.0
    top_p: float = 1.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = top_p_logits(logits / self.temperature, self.top_p).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)


def top_p_logits(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits [..., V] without the ids that have top_p of the mass, or more, above them."""
    if top_p >= 1:
        return logits
    probabilities, ids = logits.softmax(-1).sort(-1, descending=True)
    removed = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(removed.scatter(-1, ids, removed), float("-inf"))


@torch.no_grad()
def continued(model: Qwen3ForCausalLM, prompts: torch.Tensor, new: int, choose: Choice) -> torch.Tensor:
    """Prompts [B, S] with `new` more ids each, chosen from the logits [B, V] of the last position."""
    cache, ids, step = DynamicCache(), prompts, prompts
    for _ in range(new):
        step = choose(model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1])
        ids = torch.cat([ids, step], dim=1)
    return ids


def written(
    model: Qwen3ForCausalLM, source: Iterator[torch.Tensor], ways: Sequence[tuple[int, Choice]], length: int
) -> torch.Tensor:
    """Rows [R, length] of the model's own text: for each (tokens, choice) a batch that begins as the source's does."""
    parts = []
    for tokens, choose in track(ways, "own text"):
        parts.append(continued(model, next(source)[:, :tokens], length - tokens, choose))
    return torch.cat(parts)


def weighted_mean(losses: Iterable[torch.Tensor], decay: float) -> torch.Tensor:
    """The mean of each draft's loss, the n-th with weight decay^n."""
    weighted = [decay**n * loss for n, loss in enumerate(losses)]
    return torch.stack(weighted).sum() / sum(decay**n for n in range(len(weighted)))
