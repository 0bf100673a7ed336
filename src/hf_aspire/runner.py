"""Runs a packed batch through the unmodified model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention import STEP, running
from .backends import Backend, BackendStep
from .batch import MixedBatch
from .cache import AspireCache
from .compat import CACHE_NAME, PreTrainedModel
from .compiled import CompiledSteps
from .graphs import Graphs
from .request import RowKind

if TYPE_CHECKING:
    from .choice import Choice
    from .step_tables import Plan, StepTables  # they import triton, which a CPU need not have


class Runner:
    """The model, its cache and the kernels of a call.

    Args:
        model: The model, its attention switched to ours.
        cache: Pools.
        backend: Kernels.
        keeps_logits: Whether the model computes logits for chosen tokens only.
        steps: Runs forwards with compiled layers, or None.
        graphs: Captured forwards of planned steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: AspireCache,
        backend: Backend,
        keeps_logits: bool,
        steps: CompiledSteps | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._keeps_logits = keeps_logits
        self._step = BackendStep(backend)
        self._steps = steps
        self._graphs = Graphs(False) if graphs is None else graphs
        self.backend = backend

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """The model's embeddings `[1, T, hidden]` of tokens `[1, T]`."""
        return self._model.get_input_embeddings()(token_ids).clone()

    @torch.no_grad()
    def forward(self, batch: MixedBatch) -> Tensor:
        """One forward of all rows.

        Returns:
            Logits `[K, V]` of the tokens in `batch.logits_index`, in the model's dtype.
        """
        self.backend.plan(batch)
        tokens = {"input_ids": batch.token_ids} if batch.embeds is None else {"inputs_embeds": batch.embeds}
        kept = {"logits_to_keep": batch.logits_index} if self._keeps_logits else {}
        # Prompts are left out: the compiler fits its kernels to the sizes that it meets first, and steps are small.
        step = all(row.kind is not RowKind.PREFILL for row in batch.rows)
        logits = self._forward(batch.position_ids, {**tokens, **kept}, compiled=step)
        logits = logits if self._keeps_logits else logits[batch.logits_index.to(logits.device)]
        return logits.to(batch.token_ids.device)

    @torch.no_grad()
    def forward_planned(self, plan: Plan, tables: StepTables, choice: Choice) -> tuple[Tensor, bool]:
        """One forward of a planned step, the lists that its scores make, and the tokens that its logits choose.

        Returns:
            What `Choice.settle` does; valid until the next forward. And whether nothing was compiled or captured.
        """
        steady = self._graphs.knows(plan.shape)
        result = self._graphs.run(plan.shape, lambda: self._planned(plan, tables, choice))
        if plan.shape.settles:
            return result, steady
        if plan.shape not in self._graphs:  # its logits are elsewhere every time
            return choice.settle(plan, result), steady
        steady = steady and choice.knows(plan, result)
        return choice.run(plan, result), steady

    def _planned(self, plan: Plan, tables: StepTables, choice: Choice) -> Tensor:
        token_ids, position_ids = tables.fill(plan)
        logits = self._forward(position_ids, {"input_ids": token_ids}, compiled=True)
        tables.renew(plan)
        return choice.settle(plan, logits) if plan.shape.settles else logits

    def _forward(self, position_ids: Tensor, inputs: dict[str, Any], compiled: bool) -> Tensor:
        logits = None
        if compiled and self._steps is not None and position_ids.shape[1] > 1:  # a single token would compile again
            logits = self._steps.run(lambda twin: self._run(twin, position_ids, inputs))
        return self._run(self._model, position_ids, inputs) if logits is None else logits

    def _run(self, model: PreTrainedModel, position_ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        inputs = inputs | {
            "position_ids": position_ids,
            CACHE_NAME: self._cache,
            "use_cache": True,
            "return_dict": True,
            STEP: self._step,
        }
        with running(self._step):
            logits: Tensor = model(**inputs).logits[0]
        return logits
