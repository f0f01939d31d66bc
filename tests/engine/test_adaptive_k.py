"""AdaptiveK on a synthetic load: the best k, a new best one after a change, and few probes."""

from __future__ import annotations

import random

import pytest

from trnspec.engine.adaptive_k import AdaptiveK, FixedK, StepResult

# milliseconds of a step by k: a device whose drafts cost little, one of the demo pair, and one where they never pay
COSTS = {"cheap": {0: 1.0, 7: 1.4}, "demo": {0: 1.0, 3: 2.0, 7: 3.5}, "dear": {0: 1.0, 7: 9.0}}


class Load:
    """Steps of so many requests, each draft of which is accepted with a chance."""

    def __init__(self, rule: AdaptiveK | FixedK, cost: dict[int, float], running: int = 1, seed: int = 0) -> None:
        self.rule, self.cost, self.running, self.rng = rule, cost, running, random.Random(seed)

    def run(self, chance: float, steps: int, slower: float = 1.0) -> tuple[float, list[int]]:
        """Tokens a millisecond, and the k of each step; a step is up to a tenth slower than the last."""
        tokens, seconds, ks = 0, 0.0, list[int]()
        for _ in range(steps):
            k, requests = self.rule.choose(), list[StepResult]()
            for _ in range(self.running):
                accepted = 0
                while accepted < k and self.rng.random() < chance:
                    accepted += 1
                requests.append(StepResult(k, accepted))
            took = slower * self.cost[k] * self.rng.uniform(1, 1.1)
            tokens, seconds = tokens + sum(r.accepted + 1 for r in requests), seconds + took
            self.rule.ended(k, took, requests)
            ks.append(k)
        return tokens / seconds, ks


def _best(cost: dict[int, float], chance: float, running: int) -> float:
    return max(Load(FixedK(k), cost, running).run(chance, 2000)[0] for k in cost)


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("cost", COSTS)
def test_it_converges_to_the_best_k(cost: str, chance: float, running: int) -> None:
    load = Load(AdaptiveK(tuple(COSTS[cost])), COSTS[cost], running)
    load.run(chance, 1000)
    reached, _ = load.run(chance, 2000)
    # a probe of drafts that never pay costs up to a fifth of the time
    assert reached / _best(COSTS[cost], chance, running) > (0.75 if cost == "dear" else 0.93)


def test_it_returns_after_a_change_of_acceptance_and_not_after_one_of_the_load() -> None:
    load = Load(AdaptiveK((0, 7)), COSTS["demo"], 4)
    for chance, best in ((0.95, 7), (0.1, 0), (0.95, 7), (0.1, 0)):
        load.run(chance, 2500)
        assert load.rule.choose() == best or load.rule._probing  # type: ignore[union-attr]
        assert load.run(chance, 500)[1].count(best) > 450
    for slower in (1.0, 5.0, 1.0, 0.2):
        assert load.run(0.1, 1000, slower)[1].count(0) > 900


@pytest.mark.parametrize("cost", COSTS)
def test_probes_are_few(cost: str) -> None:
    rule = AdaptiveK(tuple(COSTS[cost]))
    load, probes = Load(rule, COSTS[cost]), 0
    for _ in range(3000):
        probes += rule._probing
        load.run(0.6, 1)
    assert 0 < probes <= 3000 * rule.PROBE_SHARE + rule.PROBE_STEPS


def test_steps_of_another_k_and_without_a_time_teach_no_time() -> None:
    """A step that was launched before the choice, and one that ran other graphs too."""
    rule = AdaptiveK((0, 3))
    for _ in range(200):
        rule.ended(0, 1e-9, [])
        rule.ended(3, None, [StepResult(3, 0)])
    assert rule.current == 3
    assert rule._cost == {3: 1.0}
    assert rule.tokens(3) < 1.1
    assert FixedK(2).choose() == 2
