"""Settings that every test needs: one thread per worker, no hub, reproducible property tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for programs that tests start

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Wall-clock checks of hypothesis fail on a loaded machine, not on wrong code.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("ci"), derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
