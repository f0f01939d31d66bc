"""Requests served as a server does it, ahead of what the host has read; and graphs whose runs are watched."""

from __future__ import annotations

from typing import Any

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.request import Request
from trnspec.runtime.xla import XlaRunner


class Watched:
    """XlaRunner, and the keys of those that ran."""

    def __init__(self, graphs: XlaRunner) -> None:
        self.graphs, self.keys = graphs, list[GraphKey]()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        return self.graphs.run(key, inputs)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        self.keys.append(key)
        return self.graphs.draft(key, inputs)


def ids_ahead(engine: AsyncEngine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """The ids of each request, and how many steps followed one that was not read."""
    numbers, followed = [engine.add(request) for request in requests], 0
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        engine.launch_next()
        for event in engine.step():
            ids[event.number] += event.ids
        followed += engine.launched
        if not engine._waiting or engine.slots.full:
            engine.launch()
    return [ids[number] for number in numbers], followed
