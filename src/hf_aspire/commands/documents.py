"""Real texts that every Python brings along, so that nothing is downloaded."""

from __future__ import annotations

import argparse
import heapq
import inspect
import queue
import statistics
from dataclasses import dataclass
from pydoc_data.topics import topics


@dataclass(frozen=True)
class Document:
    """A text and what to do with it."""

    title: str
    text: str
    task: str

    @property
    def prompt(self) -> str:
        """The message to the model."""
        return f"{self.text.strip()}\n\n{self.task}"


def documents() -> list[Document]:
    """Four documents of different lengths, each with a task: 1k to 2.7k tokens of SmolLM2 under Python 3.11.

    A little more or less from one version of Python to the next.
    """
    return [
        Document(
            "manual of Python's statistics module",
            str(statistics.__doc__),
            "Which functions are there, and what does each of them compute?",
        ),
        Document("essay on heaps by F. Pinard", heapq.__about__, "Summarize the text above."),
        Document("source of the class queue.Queue", inspect.getsource(queue.Queue), "Explain this class."),
        Document(
            "Python's language reference on comparisons",
            topics["comparisons"],
            "Summarize the text above in your own words.",
        ),
    ]


def long_text() -> str:
    """One long text: 25k tokens of SmolLM2."""
    return inspect.getsource(argparse)
