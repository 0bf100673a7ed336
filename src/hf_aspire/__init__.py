"""Lossless batched self-speculative decoding for Hugging Face Transformers."""

from .config import AspireConfig
from .generation import AspireOutput
from .integration import disable, enable, generate, release
from .stats import AspireStats

__version__ = "0.1.0"
__all__ = ["AspireConfig", "AspireOutput", "AspireStats", "disable", "enable", "generate", "release"]
