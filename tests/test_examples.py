"""The examples run as they are."""

import runpy
from pathlib import Path

from tiny_model import save_tiny_model

import hf_aspire

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_quickstart_answers_both_prompts_and_prints_the_figures(tmp_path, monkeypatch, capsys):
    save_tiny_model(tmp_path)
    monkeypatch.setattr("sys.argv", ["quickstart.py", str(tmp_path)])
    try:
        runpy.run_path(str(EXAMPLES / "quickstart.py"))
    finally:
        hf_aspire.disable()  # the example leaves it enabled, as a program would
    assert "batch of 2: 64 new tokens" in capsys.readouterr().out
