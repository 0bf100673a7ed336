"""Runs a packed batch through the unmodified model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import STEP, running
from .backends import Backend, BackendStep
from .batch import MixedBatch
from .cache import AspireCache
from .compat import CACHE_NAME, PreTrainedModel


class Runner:
    """The model, its cache and the kernels of a call.

    Args:
        model: The model, its attention switched to ours.
        cache: Pools.
        backend: Kernels.
        keeps_logits: Whether the model computes logits for chosen tokens only.
    """

    def __init__(self, model: PreTrainedModel, cache: AspireCache, backend: Backend, keeps_logits: bool) -> None:
        self._model = model
        self._cache = cache
        self._keeps_logits = keeps_logits
        self._step = BackendStep(backend)
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
        inputs: dict[str, Any] = {
            **({"input_ids": batch.token_ids} if batch.embeds is None else {"inputs_embeds": batch.embeds}),
            "position_ids": batch.position_ids,
            CACHE_NAME: self._cache,
            "use_cache": True,
            "return_dict": True,
            STEP: self._step,
        }
        if self._keeps_logits:
            inputs["logits_to_keep"] = batch.logits_index
        with running(self._step):
            logits: Tensor = self._model(**inputs).logits[0]
        logits = logits if self._keeps_logits else logits[batch.logits_index.to(logits.device)]
        return logits.to(batch.token_ids.device)
