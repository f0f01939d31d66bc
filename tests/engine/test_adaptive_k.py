"""AdaptiveK in synthetic worlds: step times and acceptance that a test sets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from trnspec.engine.adaptive_k import AdaptiveK

KS = (0, 3, 7)
# seconds of a step of k 0, 3, 7: a device, where a draft costs little, and a CPU
DEVICE, CPU = {0: 7.5, 3: 13.0, 7: 21.7}, {0: 1.1, 3: 2.6, 7: 5.0}


def tokens(k: int, chance: float, rng: random.Random) -> int:
    """Accepted drafts of a step of k."""
    accepted = 0
    while accepted < k and rng.random() < chance:
        accepted += 1
    return accepted


def run(chooser: AdaptiveK, seconds: dict[int, float], chance: Callable[[int], float], steps: int) -> float:
    """Tokens a second and request of `steps` steps."""
    rng, emitted, elapsed = random.Random(3), 0, 0.0
    for step in range(steps):
        k = chooser.choose()
        results = [(k, tokens(k, chance(step), rng)) for _ in range(2)]
        chooser.ended(k, time := seconds[k] * rng.uniform(0.97, 1.03), results)
        emitted, elapsed = emitted + sum(1 + accepted for _, accepted in results), elapsed + time
    return emitted / elapsed


@pytest.mark.parametrize("seconds", [DEVICE, CPU], ids=["device", "CPU"])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8, 0.95])
def test_it_comes_close_to_the_best_fixed_k(seconds: dict[int, float], chance: float) -> None:
    best = max(run(AdaptiveK([k]), seconds, lambda _: chance, 6000) for k in KS)
    assert run(AdaptiveK(KS), seconds, lambda _: chance, 6000) > 0.92 * best


def test_it_returns_after_a_change_of_the_load() -> None:
    chooser = AdaptiveK(KS)
    run(chooser, DEVICE, lambda _: 0.05, 3000)
    assert chooser.current == 0
    run(chooser, DEVICE, lambda _: 0.97, 5000)
    assert chooser.current == 7


def test_probes_take_a_bounded_share_of_the_steps() -> None:
    chooser, probes = AdaptiveK(KS), 0
    run(chooser, DEVICE, lambda _: 0.9, 2000)
    for _ in range(4000):
        k = chooser.choose()
        probes += k != chooser.current
        chooser.ended(k, DEVICE[k], [(k, min(k, 6))] * 2)
    assert 0 < probes <= 4000 / 31


def test_the_cost_of_a_k_is_that_of_its_steps() -> None:
    """The step after a change of k was launched before it, and the next two take the time of the k before."""
    chooser, ks = AdaptiveK(KS), [7, 7, 7, 7]
    for _ in range(4000):
        ks = [*ks[1:], chooser.choose()]
        chooser.ended(ks[2], DEVICE[ks[0]], [(ks[2], ks[2])])
    assert {k: cost / chooser._cost[0] for k, cost in chooser._cost.items()} == pytest.approx(
        {k: seconds / DEVICE[0] for k, seconds in DEVICE.items()}, rel=0.02
    )


def test_a_k_that_promises_no_more_replaces_none() -> None:
    """At this acceptance 3 and 7 emit as many tokens per second."""
    chooser, chance, current = AdaptiveK(KS), 0.8, list[int]()
    equal = {k: sum(chance**n for n in range(k + 1)) for k in (3, 7)} | {0: 9.0}
    for _ in range(100):
        run(chooser, equal, lambda _: chance, 50)
        current.append(chooser.current)
    assert sum(a != b for a, b in itertools.pairwise(current)) <= 8


def test_a_step_without_a_time_teaches_acceptance_only() -> None:
    chooser = AdaptiveK(KS)
    for step in range(400):
        chooser.ended(chooser.choose(), 1.0 if step < 30 else None, [(7, 0)])
    assert chooser.tokens(7) < 2 < AdaptiveK(KS).tokens(7)
    assert chooser.current == 7
