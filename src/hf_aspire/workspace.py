"""What outlives a call on a GPU: pools, tables, captured graphs and compiled layers, per model.

A workspace is made for one state of a model: graphs hold the addresses of its parameters, and compiled code its
attributes. Whatever changes either (an adapter, a dtype, a hook, training mode) changes the fingerprint, and the next
call makes a new workspace.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .cache import AspireCache, LayerSpec
from .capacity import allowed_pages, page_count
from .choice import Choice
from .compat import PreTrainedModel
from .compiled import CompiledSteps, compile_obstacle, replay_obstacle
from .config import AspireConfig
from .cost_model import CostModel
from .decoding import Decoding
from .device_lists import DeviceLists
from .device_state import DeviceState
from .fingerprint import fingerprint
from .graphs import Captures, Graphs
from .memory import Sizes
from .pipeline import Pipeline
from .runner import Runner
from .selection import ContextPolicy, resolved_granularity
from .step_tables import StepTables
from .testing import Replay
from .triton_backend import TritonBackend

_GRAPH_STEPS = 16
"""New tokens from which graphs are captured. Not tuned: a shape is captured the second time that it is needed."""
_COMPILE_STEPS = 2048
"""New tokens, asked of a model over all calls, from which its layers are compiled. Not tuned."""


class Workspace:
    """Everything that the steps of a call work on.

    Args:
        model: The model.
        layers: Shapes per layer.
        sizes: What it must hold.
        config: Budgets.
        policy: Which layers score what.
        compiles: Whether to compile the decoder layers.
        captures: Whether to capture CUDA graphs.
        limited: Whether memory had no room for more pages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        sizes: Sizes,
        config: AspireConfig,
        policy: ContextPolicy,
        compiles: bool,
        captures: bool,
        limited: bool,
    ) -> None:
        self.sizes = sizes
        self._limited = limited
        self._rested: torch.cuda.Event | None = None
        cache = AspireCache(layers, sizes.pages, config.page_size, sizes.slots + 1, sizes.pages_per_request, True)
        self.cache = cache
        with torch.inference_mode(False):
            most = config.max_draft + 1
            self.state = DeviceState(sizes.slots, sizes.columns, cache.page_table, config.page_size, most)
            self.lists = DeviceLists(config, policy, self.state, sizes.longest)
            self.backend = TritonBackend(cache, layers, policy)
            self.graphs = Graphs(captures)
            self.tables = StepTables(self.backend, self.state, self.lists, self.graphs, sizes.longest)
        self.steps = CompiledSteps(model) if compiles else None
        self.cost_model: CostModel | None = None
        self._choices: tuple[Hashable, Captures[Hashable]] = (None, Captures(False))

    def choice(self, decoding: Decoding) -> Choice:
        """What chooses a call's tokens, with the graphs of the last call if it chooses as that did."""
        captures = Captures[Hashable](False)
        if decoding.processing.key is not None:
            key = decoding.processing.key, decoding.sampler.key
            if key != self._choices[0]:
                self._choices = key, Captures(self.graphs.enabled)
            captures = self._choices[1]
        return Choice(self.state, decoding.processing, decoding.sampler, captures)

    def rest(self) -> None:
        """Ends a call's use, whose last steps the device may still be working on."""
        if self.state.fields.is_cuda:
            self._rested = torch.cuda.Event()
            self._rested.record()

    def wake(self) -> None:
        """Makes the current stream, which may be another one, wait for those."""
        if self._rested is not None:
            torch.cuda.current_stream(self.state.fields.device).wait_event(self._rested)

    def holds(self, needed: Sizes, least_pages: int) -> bool:
        """Whether it suffices for a call, or no larger one could be made."""
        pages = least_pages if self._limited else needed.pages
        return self.sizes.hold(replace(needed, pages=pages))


class Workspaces:
    """The workspaces of all models, each kept while its model is alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, Workspace]] = WeakKeyDictionary()
        self._asked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()

    def take(self, model: PreTrainedModel, key: Hashable) -> Workspace | None:
        """The workspace kept for a model, if it was made for the same state of it; nobody else gets it meanwhile."""
        with self._lock:
            found, workspace = self._kept.pop(model, (None, None))
        return workspace if found == key else None

    def keep(self, model: PreTrainedModel, key: Hashable, workspace: Workspace) -> None:
        """Keeps a workspace for the next call, unless pages of it are still in use."""
        if not workspace.cache.allocator.all_free:
            return
        with self._lock:
            self._kept.setdefault(model, (key, workspace))

    def drop(self, model: nn.Module) -> None:
        """Frees what is kept for a model, or for one that it wraps."""
        with self._lock:
            for module in model.modules():
                if isinstance(module, PreTrainedModel):
                    self._kept.pop(module, None)
                    self._asked.pop(module, None)

    def compiles(self, model: PreTrainedModel, config: AspireConfig, steps: int) -> bool:
        """Whether a call of up to `steps` steps runs compiled layers; warns where it should and cannot."""
        with self._lock:
            asked = self._asked[model] = self._asked.get(model, 0) + steps
        if config.compile is False or (config.compile == "auto" and asked < _COMPILE_STEPS):
            return False
        return not _hindered(compile_obstacle(model), "does not compile layers")

    def captures(self, model: PreTrainedModel, config: AspireConfig, steps: int) -> bool:
        """Whether a call of up to `steps` steps captures CUDA graphs; warns where it should and cannot.

        A short call makes none of its own accord, but goes on with those that are there: it would drop them otherwise.
        """
        with self._lock:
            _, kept = self._kept.get(model, (None, None))
        pays = steps >= _GRAPH_STEPS or (kept is not None and len(kept.graphs) > 0)
        if config.cuda_graphs is False or (config.cuda_graphs == "auto" and not pays):
            return False
        return not _hindered(replay_obstacle(model), "runs without CUDA graphs")


workspaces = Workspaces()


class LeasedMemory:
    """A workspace as the memory of one call.

    Args:
        model: The model.
        layers: Shapes per layer.
        needed: How much the call needs, at most.
        least_pages: Pages without which it cannot run; the others only make rows wait.
        config: Ours.
        policy: Which layers score what.
        steps: Steps that the call may take.

    Raises:
        ValueError: The least pages do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        needed: Sizes,
        least_pages: int,
        config: AspireConfig,
        policy: ContextPolicy,
        steps: int,
    ) -> None:
        compiles = workspaces.compiles(model, config, steps)
        captures = workspaces.captures(model, config, steps) and layers[0].device.type == "cuda"
        self._model = model
        self._key = (fingerprint(model), tuple(layers), policy, _budget_fields(config), compiles, captures)
        workspace = workspaces.take(model, self._key)
        if workspace is None or not workspace.holds(needed, least_pages):
            # What other calls needed is made again, so that calls of all sizes find room in the end.
            wanted = needed if workspace is None else workspace.sizes.joined(needed)
            workspace = None  # its memory is free before the new one's is counted
            pages = page_count(wanted.pages, least_pages, needed.longest, config, layers)
            sizes = replace(wanted, pages=pages).rounded(allowed_pages(config, layers))
            limited = pages < wanted.pages
            workspace = Workspace(model, layers, sizes, config, policy, compiles, captures, limited)
        workspace.wake()
        self._workspace = workspace
        self.cache = workspace.cache
        self.history = workspace.state.history[: needed.slots]

    @property
    def cost_model(self) -> CostModel | None:
        """See `Memory`. Calls on the same workspace have the same kernels, and mostly the same step times."""
        return self._workspace.cost_model

    @cost_model.setter
    def cost_model(self, model: CostModel | None) -> None:
        self._workspace.cost_model = model

    def runner(self, model: PreTrainedModel, keeps_logits: bool) -> Runner:
        """See `Memory`."""
        work = self._workspace
        return Runner(model, self.cache, work.backend, keeps_logits, work.steps, work.graphs)

    def pipeline(self, decoding: Decoding, replay: Replay | None) -> Pipeline:
        """See `Memory`."""
        work = self._workspace
        return Pipeline(decoding, work.tables, work.state, work.lists, work.choice(decoding), replay)

    def close(self) -> None:
        """Keeps the workspace for the model's next call."""
        self._workspace.rest()
        workspaces.keep(self._model, self._key, self._workspace)


def _hindered(reason: str | None, what: str) -> bool:
    if reason is not None:
        warnings.warn(f"hf_aspire {what}: {reason}", RuntimeWarning, stacklevel=2)
    return reason is not None


def _budget_fields(config: AspireConfig) -> Hashable:
    budget = (config.sparsity, config.min_pages, config.recent_pages, resolved_granularity(config), config.max_draft)
    return (config.page_size, config.kv_memory, *budget)
