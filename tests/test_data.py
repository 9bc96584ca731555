"""A batch is a function of its address, whatever the packing, and ready when it is asked for."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.data import batch, window
from gpt.errors import DataError
from gpt.tokens import HEADER, Tokens, header
from tests.texts import relaxed, run_python


def tokens_of(n: int) -> np.ndarray:
    return np.arange(n).astype(np.uint16)


def test_targets_are_the_inputs_one_further():
    tokens = np.random.default_rng().integers(0, 60000, 5000).astype(np.uint16)
    x, y = batch(tokens, 32, seed=3, step=7, rows=range(12))
    assert x.shape == y.shape == (12, 32) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = tokens.tolist()
    windows = {tuple(text[i : i + 33]) for i in range(5000 - 32)}
    assert all(tuple([*row.tolist(), last.item()]) in windows for row, last in zip(x, y[:, -1], strict=True))


@relaxed
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_a_row_depends_on_seed_step_and_row_alone(seed, step, start, more, stride):
    tokens = tokens_of(3000)
    everything = batch(tokens, 8, seed, step, range(120))[0]
    rows = range(start, start + more, stride)
    np.random.seed(0)  # what the global generator does is of no matter
    assert torch.equal(batch(tokens, 8, seed, step, rows)[0], everything[list(rows)].reshape(len(rows), 8))


def test_other_seeds_steps_and_rows_give_other_windows():
    tokens = tokens_of(60000)
    drawn = [batch(tokens, 1, seed, step, range(8))[0] for seed in range(5) for step in range(20)]
    firsts = torch.cat(drawn).flatten().tolist()  # 800 of 60,000 starts: about 5 meet by chance
    assert len(set(firsts)) > 770


@pytest.mark.parametrize("seed", np.random.default_rng().integers(0, 2**31, 2).tolist(), ids="12")
def test_every_window_is_as_likely_as_any_other(seed):
    n, length, draws = 13, 3, 20000
    starts = batch(tokens_of(n), length, seed, 0, range(draws))[0][:, 0]
    counts = torch.bincount(starts, minlength=10)
    assert len(counts) == n - length  # from 0 to the last window, which ends with the last token
    chi_square = ((counts - draws / 10) ** 2 / (draws / 10)).sum().item()
    assert chi_square < 40  # 9 degrees of freedom: once in 100,000 tries


def test_exactly_one_window_works_and_one_token_less_is_refused():
    x, y = batch(tokens_of(65), 64, 0, 0, range(5))
    assert torch.equal(x, torch.arange(64).expand(5, 64)) and torch.equal(y, torch.arange(1, 65).expand(5, 64))
    for n in (64, 1, 0):
        with pytest.raises(DataError, match=f"model.block_size: got 64, which needs 65 tokens .* has {n};"):
            batch(tokens_of(n), 64, 0, 0, range(5))


def test_windows_start_where_they_are_told():
    x, y = window(tokens_of(100), np.array([0, 50, 90]), 9)
    assert x[:, 0].tolist() == [0, 50, 90] and y[:, -1].tolist() == [9, 59, 99]


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Four 64-bit numbers of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    mask = 2**64 - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & mask, (a >> 64) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def offset(starts: int, seed: int, step: int, row: int) -> int:
    """Where a row starts, written down a second time: number `row` of the stream of (seed, step), modulo `starts`."""
    return philox((seed, int.from_bytes(b"nanoPE", "big")), [row // 4 + 1, 0, 0, step])[row % 4] % starts


@relaxed
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 200))
def test_a_row_starts_where_philox_says(seed, step, row):
    x, _ = batch(tokens_of(60008), 8, seed, step, range(row, row + 1))
    assert x[0, 0] == offset(60000, seed, step, row)


@pytest.mark.parametrize(
    "seed, step, row, expected",
    [
        (0, 0, 0, 724056),
        (0, 0, 11, 871097),
        (0, 2999, 0, 785641),
        (1, 0, 0, 972786),
        (1337, 500, 7, 842636),
        (2**40, 10**6, 1000, 812639),
    ],
)
def test_batches_stay_the_same_from_version_to_version(seed, step, row, expected):
    """A change here makes every run that was ever published unrepeatable."""
    x, y = batch(np.arange(10**6 + 64, dtype=np.uint32), 64, seed, step, range(row, row + 1))
    assert x.tolist() == [list(range(expected, expected + 64))] and y[0, -1] == expected + 64


def large_file(folder: Path, size: int = 2**30) -> Path:
    """A token file of this many bytes of ids that takes no disk: a hole."""
    path = folder / "large.bin"
    with open(path, "wb") as file:
        file.write(header(np.dtype(np.uint16), size // 2))
        file.truncate(HEADER.size + size)
    return path


def test_a_batch_costs_its_own_size_whatever_the_corpus_has(tmp_path):
    tokens = Tokens([large_file(tmp_path)], [2**29], np.dtype(np.uint16))
    batch(tokens, 64, 0, 0, range(12))  # imports
    tracemalloc.start()
    try:
        batch(tokens, 64, 0, 1, range(12))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 65 * 24 + 20000  # bytes: windows, inputs and targets, and what Python needs for a call


def test_importing_the_rooms_of_data_imports_nothing_heavy():
    code = "import sys, gpt.prepare, gpt.data, data; print(*sys.modules)"
    loaded = set(run_python(code).stdout.split())
    assert "gpt.prepare" in loaded and not loaded & {"torch", "tiktoken", "filelock", "hydra", "wandb", "matplotlib"}


def test_resident_memory_stays_flat_over_20000_batches_of_a_large_file(tmp_path):
    path = large_file(tmp_path)
    code = """
import sys, numpy as np
from pathlib import Path
from gpt.data import batch
from gpt.tokens import Tokens
tokens = Tokens([Path(sys.argv[1])], [2**29], np.dtype(np.uint16))
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
for step in range(200):
    batch(tokens, 64, 0, step, range(4))
before = highest = resident()
for step in range(20000):
    batch(tokens, 64, 0, step, range(4))
    if step % 500 == 0:
        highest = max(highest, resident())
print(highest - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system lacks")
    done = run_python(code, path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20  # MiB; left mapped, it would be hundreds
