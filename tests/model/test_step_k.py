"""The rule that chooses k, in a world whose times and acceptance are known: never far behind the best fixed k."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from model.serving.request import Request
from model.serving.slots import Slot
from model.serving.step_k import Always, Ended, Paying, StepK

# seconds of a step by k, as on the demo pair's CPU
TRUE = {0: 1.0, 3: 1.7, 7: 2.4}
IDS = 64


@dataclass
class World:
    """Requests one after the other on `slots` slots; draft by draft, `chance` says whether the target agrees.

    The first `early` ids of a request are agreed on at half that chance. A step behind one of another k is `switch`
    times slower: it could not begin before that one was read.
    """

    chance: float
    slots: int = 1
    requests: int = 200
    noise: float = 0.1
    seed: int = 0
    numbers: int = 0
    of_k: dict[int, int] = field(default_factory=dict)
    early: int = 0
    switch: float = 1.0

    def seconds(self, rule: StepK, load: float = 1.0) -> float:
        """Time until every request has its ids."""
        draw, spent, seated, left = random.Random(self.seed), 0.0, list[Slot](), self.requests
        holes, before = set[int](), -1
        while left or seated:
            while left and len(seated) < self.slots:
                seated.append(Slot(len(seated), self.numbers, Request((1,), max_new_tokens=IDS)))
                self.numbers, left = self.numbers + 1, left - 1
            k = rule.choose(seated)
            assert rule.choose(seated) == k, "asked twice, it answers the same"
            took = load * TRUE[k] * draw.uniform(1, 1 + self.noise) * (1 if k == before else self.switch)
            before = k
            self.of_k[k], spent, ended = self.of_k.get(k, 0) + 1, spent + took, []
            for slot in seated:
                worse = slot.number in holes or len(slot.result.ids) < self.early
                chance = self.chance * (0.5 if worse else 1)
                accepted = next((n for n in range(k) if draw.random() >= chance), k)
                ended.append(Ended(slot.number, k, accepted))
                slot.result.ids += [0] * min(accepted + 1, IDS - len(slot.result.ids))
                if not k:
                    holes.add(slot.number)
            rule.ended(k, took, ended)
            seated = [slot for slot in seated if len(slot.result.ids) < IDS]
        return spent


def _best(**world: float) -> float:
    return min(World(**world).seconds(Always(k)) for k in TRUE)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_it_keeps_up_with_the_best_fixed_k(chance: float, slots: int) -> None:
    world = World(chance, slots)
    assert _best(chance=chance, slots=slots) / world.seconds(Paying(TRUE)) > 0.97


@pytest.mark.parametrize("slots", [1, 4])
def test_drafts_that_fit_later_and_a_cost_of_changing_k_do_not_mislead_it(slots: int) -> None:
    """As random prompts are answered: at first nothing fits, then the text repeats itself."""
    world: dict[str, Any] = {"chance": 0.95, "early": 16, "switch": 1.5, "slots": slots}
    rule = Paying(TRUE)
    World(0.0, requests=100).seconds(rule)
    World(**world, numbers=100).seconds(rule)
    assert _best(**world) / World(**world, numbers=300).seconds(rule) > 0.95


def test_it_finds_the_best_k_again_when_the_load_turns() -> None:
    """From prompts that no draft fits to prompts that every draft fits, and back."""
    rule = Paying(TRUE)
    numbers = 0
    for chance, best in ((0.0, 0), (0.95, 7), (0.0, 0), (0.95, 7)):
        World(chance, requests=100, numbers=numbers).seconds(rule)
        numbers += 100
        world = World(chance, requests=100, numbers=numbers)
        numbers += 100
        world.seconds(rule)
        assert max(world.of_k, key=lambda k: world.of_k[k]) == best
        assert world.of_k[best] > 0.9 * sum(world.of_k.values())


@pytest.mark.parametrize(("wrong", "chance"), [(2.0, 0.9), (1.4, 0.02), (1.4, 0.6)])
def test_a_wrong_first_measurement_is_put_right(wrong: float, chance: float) -> None:
    """On an idle server a step has no part of the host's, so that those with drafts look too dear."""
    rule = Paying({k: s * (wrong if k else 1) for k, s in TRUE.items()})
    World(chance, requests=100).seconds(rule)
    world = World(chance, requests=200, numbers=100)
    assert _best(chance=chance) / world.seconds(rule) > 0.97


def test_a_load_that_slows_every_step_changes_nothing() -> None:
    rule = Paying(TRUE)
    for load in (1.0, 20.0, 0.1):
        world = World(0.9, requests=50)
        world.seconds(rule, load)
        assert world.of_k.get(7, 0) > 0.9 * sum(world.of_k.values())


def test_a_limit_of_drafts_counts() -> None:
    assert Paying(TRUE).choose([Slot(0, 0, Request((1,), k_limit=2))]) == 3
    assert Paying(TRUE).choose([Slot(0, 0, Request((1,), k_limit=0))]) == 0
