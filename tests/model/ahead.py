"""Requests served as a server does it, whose steps are handed over before the host has read the ones before them."""

from __future__ import annotations

from model.serving.engine import Engine
from model.serving.request import Request


def ids_ahead(engine: Engine, asked: list[Request]) -> tuple[list[list[int]], int]:
    """The ids of each request, and how many steps followed one that was not read."""
    numbers, k, followed = [engine.add(request) for request in asked], engine.shape.k, 0
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        engine.follow(k)
        for event in engine.step():
            ids[event.number] += event.ids
        followed += engine.begun
        if not engine._waiting or engine.slots.full:
            engine.begin(k)
    return [ids[number] for number in numbers], followed
