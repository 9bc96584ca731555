"""Threads are divided among the workers of the suite; every test draws fresh inputs and prints its seed on failure."""

import os

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
threads = min(max(1, cores // workers), int(os.environ.get("OMP_NUM_THREADS", cores)))
os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch, and for every process a test starts
os.environ.setdefault("WANDB_MODE", "disabled")

import random  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(threads)
hypothesis.settings.register_profile("suite", deadline=None)  # other workers share the cores
hypothesis.settings.load_profile("suite")


@pytest.fixture
def fresh() -> torch.Generator:
    """A generator with a new seed each time; pytest shows the seed of a failing test."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
