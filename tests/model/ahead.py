"""Requests served as a server does it: steps are handed over before the host has read the steps before them."""

from __future__ import annotations

from model.serving.overlap import OverlappedEngine
from model.serving.request import Request


def ids_ahead(engine: OverlappedEngine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """The ids of each request, and how many steps followed one that was not read."""
    numbers, followed = [engine.add(request) for request in requests], 0
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        engine.follow()
        for event in engine.step():
            ids[event.number] += event.ids
        followed += engine.begun
        if not engine._waiting or engine.slots.full:
            engine.begin()
    return [ids[number] for number in numbers], followed
