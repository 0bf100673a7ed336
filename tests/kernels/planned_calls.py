"""Calls whose steps run ahead of the host; under the interpreter they run the Triton kernels on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import plain
from transformers import PreTrainedModel

import hf_aspire
from hf_aspire import AspireConfig, AspireStats
from hf_aspire.workspace import Workspace


def settings(**fields: Any) -> AspireConfig:
    small = {"min_pages": 1, "recent_pages": 1, "sparsity": 0.1, "draft_length": 3, "max_draft": 4}
    return AspireConfig(**{**small, "backend": "triton", "cuda_graphs": True, "compile": False, **fields})


def run(model: PreTrainedModel, batch: dict[str, Any], config: AspireConfig, **keywords: Any) -> Any:
    """Sequences and statistics of a call."""
    found: list[AspireStats] = []
    config = AspireConfig(**{**vars(config), "on_stats": found.append})
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    text = hf_aspire.generate(model, **batch, **{"do_sample": False, **keywords}, aspire_config=config)
    return text.cpu(), found[0]


def text_of(model: PreTrainedModel, batch: dict[str, Any], **keywords: Any) -> torch.Tensor:
    return plain(model, {name: tensor.to(model.device) for name, tensor in batch.items()}, **keywords).cpu()


def made(monkeypatch: pytest.MonkeyPatch) -> list[Workspace]:
    """Every workspace that is made from now on."""
    found: list[Workspace] = []
    init = Workspace.__init__

    def note(self: Workspace, *arguments: Any) -> None:
        init(self, *arguments)
        found.append(self)

    monkeypatch.setattr(Workspace, "__init__", note)
    return found
