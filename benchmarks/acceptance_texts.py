"""Texts of the acceptance benchmark: what ships with Python, with the package's dependencies, or with the repository.

Nothing is downloaded. The texts follow the installed versions, so a run records their hashes.
"""

from __future__ import annotations

import builtins
import datetime
import importlib.metadata
import inspect
import os
import pathlib
import pydoc
import random
import shutil
import statistics
import sysconfig
from collections.abc import Callable

_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_paths()["stdlib"])
_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def texts() -> dict[str, str]:
    """Every text by name; all are longer than 6,144 tokens of any common tokenizer."""
    makers: dict[str, Callable[[], str]] = {
        "code_module": lambda: _module("argparse.py"),
        "code_files": _code_files,
        "language_reference": _language_reference,
        "module_help": _module_help,
        "questions": _questions,
        "licences": _licences,
        "readmes": _readmes,
    }
    return {name: make() for name, make in makers.items()}


def _module(name: str) -> str:
    return (_STANDARD_LIBRARY / name).read_text(encoding="utf-8")


def _code_files() -> str:
    """Small modules one after the other, as in a prompt that shows a project."""
    names = ("bisect.py", "queue.py", "sched.py", "reprlib.py", "textwrap.py", "shlex.py")
    return "\n".join(f"# file: {name}\n{_module(name)}" for name in names)


def _language_reference() -> str:
    from pydoc_data.topics import topics  # a megabyte of strings that nothing else needs

    wanted = ("compound", "class", "function", "exceptions", "execmodel", "import", "objects", "specialnames")
    return "\n".join(topics[name] for name in wanted)


def _module_help() -> str:
    return "\n".join(pydoc.plain(pydoc.render_doc(module)) for module in (statistics, random, datetime))


def _questions() -> str:
    """Questions about built-in and library functions, answered by their docstrings."""
    owners = (str, list, dict, set, bytes, int, os, os.path, shutil, inspect, builtins)
    lines = []
    for owner in owners:
        for name, member in sorted(vars(owner).items()):
            answer = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if answer and not inspect.isclass(member):
                lines.append(f"Question: What does `{owner.__name__}.{name}` do?\nAnswer: {answer}\n")
    return "\n".join(lines)


def _licences() -> str:
    own = (_REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    files = importlib.metadata.files("numpy") or []
    numpy = [str(f.locate()) for f in files if f.name == "LICENSE.txt" and f.parent.name == "licenses"]
    parts = [_module("LICENSE.txt"), own, *(pathlib.Path(path).read_text(encoding="utf-8") for path in numpy[:1])]
    return "\n\n".join(parts)


def _readmes() -> str:
    names = ("transformers", "accelerate", "typer", "rich", "tqdm")
    parts = [importlib.metadata.metadata(name) for name in names]
    return "\n\n".join(str(part.get_payload() or part["Description"]) for part in parts)
