"""The parts of a call that decide what runs and learn from how it went: the engine's and the pipeline's alike."""

from __future__ import annotations

from dataclasses import dataclass

from .cost_model import CostModel
from .planner import Planner
from .processing import Processing
from .runner import Runner
from .sampler import Sampler
from .scheduler import Schedule
from .selection import SparseContexts
from .stats import StatsRecorder


@dataclass(frozen=True)
class Decoding:
    """Parts of a call.

    Attributes:
        runner: Runs forwards.
        contexts: Sparse contexts.
        planner: Decides the rows of a step.
        schedule: Learns how rounds went.
        cost_model: Learns how long steps take.
        processing: Stock processors without state.
        sampler: Proposes and decides.
        end_tokens: Tokens that end a text; nothing is drafted behind one.
        recorder: Statistics.
        prompt_width: Columns of the padded prompt.
    """

    runner: Runner
    contexts: SparseContexts
    planner: Planner
    schedule: Schedule
    cost_model: CostModel
    processing: Processing
    sampler: Sampler
    end_tokens: frozenset[int]
    recorder: StatsRecorder
    prompt_width: int
