"""The rule that chooses k, in a world whose times and acceptance are known: never far behind the best fixed k."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from trnspec.engine.request import Request
from trnspec.engine.slots import Slot
from trnspec.engine.step_k import Always, Ended, Paying, StepK

# seconds of a step by k, and times more by bucket, about as those of the demo pair on a CPU
TRUE = {0: 1.0, 3: 1.7, 7: 2.4}
GROWTH = {128: 1.0, 256: 1.4}
# a draft's keys of the latest ids, of which steps of the target alone write none
RECENT = 32


def first(wrong: float = 1.0, cost: dict[int, float] = TRUE, running: int = 1) -> dict[tuple[int, int, int], float]:
    """What is measured before any request: times of steps with drafts may be wrong."""
    return {(k, b, running): s * more * (wrong if k else 1) for k, s in cost.items() for b, more in GROWTH.items()}


def drawn(low: float, high: float) -> Callable[[random.Random], float]:
    """A chance of each request."""
    return lambda rng: rng.uniform(low, high)


@dataclass
class World:
    """Requests one after the other on `slots` slots; draft by draft, `chance` says whether the target agrees.

    The first `early` ids of a request are agreed on at half that chance, and behind steps of the target alone at as
    little as `without` of it. `mixed` texts are easy and hard in turns. A step behind one of another k is `switch`
    times slower: it could not begin before that one was read. `uneven` steps are lengthened by what else runs: half of
    them by more than a tenth, one of twenty by two to five times. Each further running request lengthens a step of
    drafts by `crowded`.
    """

    chance: float | Callable[[random.Random], float]
    slots: int = 1
    requests: int = 100
    seed: int = 0
    of_k: dict[int, int] = field(default_factory=dict)
    early: int = 0
    switch: float = 1.0
    warming: int = 0
    mixed: bool = False
    uneven: bool = False
    crowded: float = 0.0
    without: float = 0.7
    cost: dict[int, float] = field(default_factory=lambda: TRUE)

    def seconds(self, rule: StepK, load: float = 1.0) -> float:
        """Time until every request has its ids."""
        draw, sizes, noise = (random.Random(self.seed) for _ in range(3))
        spent, seated = 0.0, list[Slot]()
        chances, drafted, hard, left, before = dict[int, float](), dict[int, list[bool]](), False, self.requests, -1
        run = 0
        while left or seated:
            while left and len(seated) < self.slots:
                slot = Slot(len(seated), left, Request((1,), max_new_tokens=sizes.randint(32, 96)))
                slot.position = sizes.randint(6, 60)
                chances[left] = self.chance(sizes) if callable(self.chance) else self.chance
                drafted[left] = [True] * RECENT
                seated, left = [*seated, slot], left - 1
            k = rule.choose(seated)
            assert rule.choose(seated) == k, "asked twice, it answers the same"
            bucket = next(b for b in GROWTH if b > max(slot.position for slot in seated) + k)
            took = load * self.cost[k] * GROWTH[bucket] * draw.uniform(1, 1.1) * (1 if k == before else self.switch)
            took *= 1 + self.crowded * (len(seated) - 1) * (k > 0)
            if self.uneven:
                took *= max(1, noise.gauss(1.1, 0.3)) * (noise.uniform(2, 5) if noise.random() < 0.05 else 1)
            run = run + 1 if k == before else 1
            took *= 1.5 if not k and run <= self.warming else 1
            before = k
            self.of_k[k], spent, ended = self.of_k.get(k, 0) + 1, spent + took, []
            for slot in seated:
                keys, ids = drafted[slot.number], slot.result.ids
                chance = chances[slot.number] * (self.without + (1 - self.without) * sum(keys[-RECENT:]) / RECENT)
                chance *= 0.5 if len(ids) < self.early else 1
                if self.mixed:
                    hard ^= draw.random() < 0.3
                    chance = 1 - (1 - chance) * (1.9 if hard else 0.1)
                accepted = next((n for n in range(k) if draw.random() >= chance), k)
                ended.append(Ended(k, accepted))
                kept = min(accepted + 1, slot.request.max_new_tokens - len(ids))
                slot.result.ids, slot.position = ids + [0] * kept, slot.position + kept
                keys += [k > 0] * kept
            rule.ended(k, bucket, took, ended)
            seated = [slot for slot in seated if len(slot.result.ids) < slot.request.max_new_tokens]
        return spent


def share(rule: Paying, **world: Any) -> float:
    """The time of the best fixed k over that of the rule, which has met such requests before."""
    World(**world | {"requests": 60}).seconds(rule)
    best = min(World(**world).seconds(Always(k)) for k in world.get("cost", TRUE))
    return best / World(**world).seconds(rule)


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_it_keeps_up_with_the_best_fixed_k(chance: float, slots: int) -> None:
    assert share(Paying(first()), chance=chance, slots=slots, requests=50 * slots + 50) > 0.96


class Recounting(Paying):
    """Reckons again at every choice, and counts how often the rule itself did."""

    reckoned = 0

    def _choose(self, slots: Any) -> int:
        answer, kept = super()._choose(slots), self._gains
        if kept is not None:
            assert kept == super()._reckoned(slots, self._of[0])
        return answer

    def _reckoned(self, slots: Any, drafts: Any) -> dict[int, float]:
        self.reckoned += 1
        return super()._reckoned(slots, drafts)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.7, 0.9])
def test_what_it_keeps_between_steps_is_never_out_of_date(chance: float) -> None:
    rule, of_k = Recounting(first() | first(running=4)), dict[int, int]()
    for seed in range(3):
        for slots in (1, 4):
            World(chance, slots, seed=seed, uneven=True, crowded=0.5, of_k=of_k).seconds(rule)
    alone = of_k.pop(0, 0)
    assert rule.reckoned < 0.5 * alone + sum(of_k.values()) + 50


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    "world",
    [{"chance": 0.8, "mixed": True}, {"chance": drawn(0.4, 1.0)}, {"chance": 0.95, "early": 16, "switch": 1.5}],
    ids=["mixed texts", "requests that differ", "late drafts"],
)
def test_texts_whose_drafts_differ_and_a_cost_of_changing_k_do_not_mislead_it(
    world: dict[str, Any], slots: int
) -> None:
    assert share(Paying(first()), **world, slots=slots, requests=50 * slots) > 0.93


def test_it_finds_the_best_k_again_when_the_load_turns() -> None:
    """From prompts that no draft fits to prompts that every draft fits, and back."""
    rule = Paying(first())
    for chance, best in ((0.0, 0), (0.95, 7), (0.0, 0), (0.95, 7)):
        World(chance).seconds(rule)
        world = World(chance)
        world.seconds(rule)
        assert max(world.of_k, key=lambda k: world.of_k[k]) == best
        assert world.of_k[best] > 0.85 * sum(world.of_k.values())


@pytest.mark.parametrize("slots", [1, 4])
def test_it_follows_texts_that_turn_every_few_thousand_ids(slots: int) -> None:
    """A trial begins where a request does, whose drafts are judged fairly, and a hopeless one is cheap, so often."""
    cost, spent, best = {0: 1.0, 7: 2.9}, 0.0, 0.0
    rule = Paying(first(cost=cost))
    for seed, chance in itertools.product(range(6), (0.95, 0.3)):
        world = {"chance": chance, "slots": slots, "requests": 60 * slots, "cost": cost, "without": 0.4, "seed": seed}
        spent += World(**world).seconds(rule)
        best += min(World(**world).seconds(Always(k)) for k in cost)
    assert best / spent > 0.88


def test_a_trial_that_loses_ends_and_waits_for_a_request_that_begins() -> None:
    cost = {0: 1.0, 7: 5.0}

    def tried(ids: int, steps: int) -> int:
        """Steps of drafts, none of which is accepted, beside a request that has so many ids."""
        rule, slot, found = Paying(first(cost=cost)), Slot(0, 0, Request((1,), max_new_tokens=10**6)), 0
        slot.result.ids = [0] * ids
        for _ in range(steps):
            found += (k := rule.choose([slot])) > 0
            rule.ended(k, 128, cost[k], [Ended(k, 0)])
        return found

    assert 0 < tried(1, 400) <= 4
    assert tried(50, 400) == 0 < tried(50, 1000)


@pytest.mark.parametrize(("wrong", "chance"), [(2.0, 0.9), (1.4, 0.02), (1.4, 0.6), (0.7, 0.5), (0.7, 0.7)])
def test_a_wrong_first_measurement_is_put_right(wrong: float, chance: float) -> None:
    """A step with drafts has another part of the host's, and of what else runs there, than a step without."""
    rule, cost = Paying(first(wrong, cost={0: 1.0, 7: 3.5})), {0: 1.0, 7: 3.5}
    World(chance, cost=cost).seconds(rule)
    assert share(rule, chance=chance, cost=cost, requests=200) > 0.96


@pytest.mark.parametrize("chance", [0.5, 0.6, 0.7])
def test_the_first_steps_of_the_target_alone_do_not_speak_for_it(chance: float) -> None:
    """Behind steps with drafts a server's step of the target alone has its own pace only after a dozen of its kind."""
    cost = {0: 1.0, 7: 3.5}
    assert share(Paying(first(0.8, cost=cost)), chance=chance, slots=4, cost=cost, warming=14, requests=200) > 0.96


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_something_else_lengthens_do_not_mislead_it(seed: int) -> None:
    world = {"chance": 0.7, "slots": 4, "cost": {0: 1.0, 7: 3.5}, "warming": 14, "uneven": True, "requests": 200}
    assert share(Paying(first(0.75, cost=world["cost"])), **world, seed=seed) > 0.95


@pytest.mark.parametrize("chance", [0.6, 0.7])
def test_one_client_and_four_in_turns_have_costs_of_their_own(chance: float) -> None:
    """A server's other work, which the first measurement does not see, grows with the ids of a step."""
    cost = {0: 1.0, 7: 2.0}
    rule, shares = Paying(first(cost=cost)), list[float]()
    for seed in range(24):
        for slots in (1, 4):
            world = {"chance": chance, "slots": slots, "requests": 16 * slots, "crowded": 0.25, "cost": cost}
            best = min(World(**world, seed=seed).seconds(Always(k)) for k in cost)
            shares.append(best / World(**world, seed=seed).seconds(rule))
    learned = shares[16:]
    assert min(statistics.mean(learned[::2]), statistics.mean(learned[1::2])) > 0.96


@pytest.mark.parametrize("chance", [0.65, 0.7])
def test_trials_lose_no_more_than_their_share(chance: float) -> None:
    """Drafts of a trial, whose cache has none of the latest keys, are refused more often than those of a long run."""
    world = {"chance": chance, "without": 0.4, "cost": {0: 1.0, 7: 3.4}, "warming": 14}
    assert statistics.mean(share(Paying(first(cost=world["cost"])), **world, seed=seed) for seed in range(24)) > 0.987


def test_a_load_that_slows_every_step_changes_nothing() -> None:
    rule = Paying(first())
    for load in (1.0, 20.0, 0.1):
        world = World(0.9, requests=50)
        world.seconds(rule, load)
        assert world.of_k.get(7, 0) > 0.85 * sum(world.of_k.values())


def test_what_a_request_cannot_keep_pays_for_nothing() -> None:
    for request in (Request((1,), k_limit=2), Request((1,), max_new_tokens=3)):
        assert Paying(first()).choose([Slot(0, 0, request)]) == 3
    for request in (Request((1,), k_limit=0), Request((1,), max_new_tokens=1)):
        assert Paying(first()).choose([Slot(0, 0, request)]) == 0


def test_a_k_that_no_request_takes_is_not_tried() -> None:
    """Its steps would run the graph of a smaller one, and the trial would never end."""
    rule, slots, tried = Paying(first()), [Slot(0, 0, Request((1,), max_new_tokens=9999, k_limit=3))], set[int]()
    for _ in range(4000):
        tried.add(k := rule.choose(slots))
        rule.ended(min(k, 3), 128, TRUE[min(k, 3)], [Ended(min(k, 3), min(k, 2))])
    assert tried == {0, 3}
