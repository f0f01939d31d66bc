"""Requests served ahead of what the host has read, and a runner whose runs are watched."""

from __future__ import annotations

from typing import Any

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.request import Request
from trnspec.runtime.runner import Runner


class Watched:
    """A runner, and the keys of the graphs that it ran."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.keys = runner, list[GraphKey]()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        return self.runner.run(key, inputs)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        self.keys.append(key)
        return self.runner.draft(key, inputs)


def ids_ahead(engine: AsyncEngine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """The tokens of each request, and how many steps were launched before the one before them was read."""
    numbers, ahead = [engine.add(request) for request in requests], 0
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        engine.launch_next()
        for event in engine.step():
            ids[event.number] += event.ids
        ahead += engine.launched is not None
        if not engine._waiting or engine.slots.full:
            engine.launch()
    return [ids[number] for number in numbers], ahead
