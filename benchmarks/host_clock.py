"""Times what the host does before every step that it launches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from hf_aspire.planner import Planner
from hf_aspire.runner import Runner


@contextmanager
def host_clock() -> Iterator[list[float]]:
    """Collects the seconds of plan and pack: from asking the planner for rows to starting the forward.

    Only of steps that are planned while the device works. Deciding who drafts, cutting the work, making all tables and
    sending them to the device are in it; launching the forward and reading outcomes are not.
    """
    seconds, began = list[float](), 0.0
    rows, forward = Planner.rows, Runner.forward_planned

    def timed_rows(planner: Planner) -> Any:
        nonlocal began
        began = time.perf_counter()
        return rows(planner)

    def timed_forward(runner: Runner, *arguments: Any) -> Any:
        seconds.append(time.perf_counter() - began)
        return forward(runner, *arguments)

    with patch.object(Planner, "rows", timed_rows), patch.object(Runner, "forward_planned", timed_forward):
        yield seconds


def host_times(seconds: list[float]) -> dict[str, float]:
    """What is written down of them, in milliseconds."""
    if not seconds:
        return {}
    median, late = 1e3 * np.quantile(seconds, [0.5, 0.9])
    return {"host_milliseconds": float(median), "host_milliseconds_90_percent": float(late)}
