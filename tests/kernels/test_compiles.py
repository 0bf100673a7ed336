"""What the interpreter runs also compiles, for a GPU that is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels")
@pytest.mark.parametrize(("what", "kernels"), [("attention 64", 13), ("attention 128", 10), ("others", 18)])
def test_kernels_compile_for_hopper(what, kernels, tmp_path):
    changed = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changed
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script, *what.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= kernels
