"""Wrapping a method of Transformers, and taking the wrapper off again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .compat import GenerationMixin


class Patch:
    """One method of `GenerationMixin`, wrapped while somebody needs it: counted, so that users may overlap."""

    def __init__(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._name = name
        self._wrap = wrap
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., Any] | None = None  # while our wrapper is in place
        self._wrapper: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """Whether anybody needs it; a wrapper that nobody needs hands every call on."""
        return self._users > 0

    def install(self) -> None:
        """Wraps the method unless it is wrapped already."""
        with self._lock:
            self._users += 1
            if self._original is None:
                self._original = getattr(GenerationMixin, self._name)
                self._wrapper = self._wrap(self._original)
                setattr(GenerationMixin, self._name, self._wrapper)

    def remove(self) -> bool:
        """Puts the original back after the last user; False if another library has wrapped it since."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and getattr(GenerationMixin, self._name) is self._wrapper:
                setattr(GenerationMixin, self._name, self._original)
                self._original = None
            return self._users > 0 or self._original is None
