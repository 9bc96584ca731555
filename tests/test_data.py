"""A batch is a function of its address, whatever the packing, and ready when it is asked for."""

import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpt.data
from gpt.data import AHEAD, NO_TARGET, Ahead, Windows, batch, shuffled, window
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


# ------------------------------------------------------------------------------------------------------------- packing


def starts_of(x: torch.Tensor) -> list[int]:
    return x[:, 0].tolist()


def laid(packing: str, tokens, documents=(0,), block_size=8, seed=0, rows=6) -> Windows:
    return Windows(packing, tokens, np.array(documents), block_size, seed, rows)


def epochs(windows: Windows, steps: int) -> list[int]:
    """What starts the rows of the first steps, in order."""
    rows = range(windows.rows_a_step)
    return [start for step in range(steps) for start in starts_of(windows.batch(step, rows)[0])]


def test_random_windows_are_those_of_batch():
    tokens = tokens_of(5000)
    for step, rows in ((0, range(6)), (7, range(2, 5)), (10**6, range(1))):
        for one, other in zip(laid("random", tokens).batch(step, rows), batch(tokens, 8, 0, step, rows), strict=True):
            assert torch.equal(one, other)


@relaxed
@given(st.integers(9, 400), st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_sequential_epochs_take_every_window_once(n, block_size, rows, seed):
    windows = laid("sequential", tokens_of(n), block_size=min(block_size, n - 1), seed=seed, rows=rows)
    block_size = windows.block_size
    count = (n - 1) // block_size
    found = epochs(windows, -(-3 * count // rows))
    for epoch in range(3):
        assert sorted(found[epoch * count : (epoch + 1) * count]) == list(range(0, count * block_size, block_size))
    x, y = windows.batch(0, range(rows))
    assert torch.equal(y, x + 1)  # tokens count up here


def test_epochs_have_orders_of_their_own():
    windows = laid("sequential", tokens_of(8 * 300 + 1), rows=30)
    found = epochs(windows, 30)
    first, second, third = found[:300], found[300:600], found[600:]
    assert first != second != third != first and first != sorted(first)
    assert (
        laid("sequential", tokens_of(8 * 300 + 1), rows=30, seed=1).batch(0, range(30))[0][:, 0].tolist() != first[:30]
    )
    together = [a == b for a, b in zip(first, second, strict=True)]
    assert sum(together) < 12  # one of 300 by chance at each place: Poisson with mean 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_an_order_is_a_permutation_of_every_count(count, fresh):
    seed = int(torch.randint(0, 2**31, (), generator=fresh))
    for epoch in (0, 1, 2**40):
        assert sorted(shuffled(np.arange(count), count, seed, epoch)) == list(range(count))


def test_an_order_of_many_windows_is_even(fresh):
    """Where the first 64th of the numbers lands: spread over all 64 parts, as chance would."""
    seed, count = int(torch.randint(0, 2**31, (), generator=fresh)), 10**9
    parts = (64 * shuffled(np.arange(6400), count, seed, 0) // count).tolist()
    chi_square = sum((parts.count(part) - 100) ** 2 / 100 for part in range(64))
    assert chi_square < 130  # 63 degrees of freedom: once in 600,000 tries


def order(n: int, count: int, seed: int, epoch: int) -> int:
    """Where number n comes, written down a second time."""

    def mix(x):
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    half = 1
    while 4**half < count:
        half += 1
    stream = int.from_bytes(b"order", "big")
    keys = [philox((seed, stream), [i // 4 + 1, 0, 0, epoch])[i % 4] for i in range(6)]
    while True:
        a, b = divmod(n, 2**half)
        for key in keys:
            a, b = b, a ^ (mix(b + key) % 2**half)
        n = a * 2**half + b
        if n < count:
            return n


@relaxed
@given(st.integers(1, 10**12), st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.data())
def test_orders_are_what_the_cipher_says(count, seed, epoch, drawn):
    numbers = drawn.draw(st.lists(st.integers(0, count - 1), max_size=5))
    found = shuffled(np.array(numbers, dtype=np.int64), count, seed, epoch)
    assert found.tolist() == [order(n, count, seed, epoch) for n in numbers]


def test_orders_stay_the_same_from_version_to_version():
    """A change here makes runs with data.packing=sequential unrepeatable."""
    assert shuffled(np.arange(5), 1000, 0, 0).tolist() == [756, 658, 106, 523, 271]
    assert shuffled(np.arange(3), 10**9, 1337, 3).tolist() == [578625300, 882692290, 505056416]


@relaxed
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 9), st.integers(1, 7))
def test_windows_of_documents_cross_no_end_and_miss_no_target(lengths, block_size, rows):
    if sum(lengths) <= block_size or max(lengths) < 2:
        return
    starts = np.cumsum([0, *lengths[:-1]])
    windows = laid("documents", tokens_of(sum(lengths)) + 1, starts, block_size, rows=rows)
    pairs = []
    for step in range(-(-windows.count // rows)):
        x, y = windows.batch(step, range(rows))
        numbers = range(step * rows, (step + 1) * rows)
        for number, inputs, targets in zip(numbers, x.tolist(), y.tolist(), strict=True):
            if number < windows.count:  # the first epoch
                kept = [(i, t) for i, t in zip(inputs, targets, strict=True) if t != NO_TARGET]
                assert kept and targets == [t for _, t in kept] + [NO_TARGET] * (block_size - len(kept))
                pairs += kept
    expected = [(i + 1, i + 2) for s, n in zip(starts.tolist(), lengths, strict=True) for i in range(s, s + n - 1)]
    assert sorted(pairs) == expected  # every target of every document once, and none across an end


@pytest.mark.parametrize("packing", ["sequential", "documents"])
def test_epochs_go_on_behind_the_rows_of_another_batch_size(packing, fresh):
    """Three steps of six rows, then steps of four: the rows are those of a run that had one row a step."""
    seed = int(torch.randint(0, 2**31, (), generator=fresh))
    lay = {"tokens": tokens_of(400), "documents": np.arange(0, 400, 50), "block_size": 8, "seed": seed}
    one, six = Windows(packing, **lay, rows_a_step=1), Windows(packing, **lay, rows_a_step=6)
    four = Windows(packing, **lay, rows_a_step=4, first=3, done=18)
    found = [start for step in range(3) for start in starts_of(six.batch(step, range(6))[0])]
    found += [start for step in range(3, 28) for start in starts_of(four.batch(step, range(4))[0])]
    assert found == epochs(one, 118) and len(set(found[: one.count])) == one.count > 18


def test_targets_of_a_step_are_those_that_count(fresh):
    """What is padded is none; and the windows of a step are looked for once, however many micro-steps it has."""
    seed = int(torch.randint(0, 2**31, (), generator=fresh))
    windows = laid("documents", tokens_of(400), range(0, 400, 23), block_size=8, seed=seed, rows=12)
    asked, chosen = [], windows._chosen
    windows._chosen = lambda step, rows: asked.append((step, rows)) or chosen(step, rows)
    for step in range(3):
        parts = []
        for micro in range(4):
            rows = range(3 * micro, 3 * micro + 3)
            parts.append(int((windows.batch(step, rows)[1] != NO_TARGET).sum()))
            assert abs(windows.worth(step, rows) * parts[-1] - windows.targets(step)) < 1e-9 * windows.targets(step)
        assert windows.targets(step) == sum(parts) < 12 * 8
    assert asked == [(step, range(12)) for step in range(3)]
    for packing in ("random", "sequential"):
        assert laid(packing, tokens_of(400), rows=12).targets(5) == 12 * 8


@relaxed
@given(st.sampled_from(["random", "sequential", "documents"]), st.integers(0, 10**6), st.integers(1, 5))
def test_means_over_parts_of_a_step_add_up_to_the_mean_over_all(packing, step, parts):
    """As gradients do: the mean over a part, divided by what the part is worth, summed."""
    windows = laid(packing, tokens_of(400), range(0, 400, 23), block_size=8, rows=10 * parts)
    whole = windows.batch(step, range(10 * parts))[1].double()
    mean = whole[whole != NO_TARGET].mean()
    total = 0
    for part in range(parts):
        rows = range(10 * part, 10 * part + 10)
        y = windows.batch(step, rows)[1].double()
        total += y[y != NO_TARGET].mean() / windows.worth(step, rows)
    assert abs(total - mean) < 1e-9 * abs(mean)
    if packing != "documents":
        assert windows.worth(step, range(10)) == parts  # exactly: the losses of old runs stay what they were


def test_documents_too_short_for_a_target_are_refused():
    with pytest.raises(DataError, match="data.packing=documents: no document has two tokens; use data.packing=random"):
        laid("documents", tokens_of(20), range(20))
    for packing in ("random", "sequential", "documents"):
        with pytest.raises(DataError, match="model.block_size: got 8, which needs 9 tokens .* has 8;"):
            laid(packing, tokens_of(8))


# --------------------------------------------------------------------------------------------------------------- ahead


def test_values_come_in_order_and_are_made_ahead():
    made = []
    with Ahead(lambda n: made.append(n) or n * n, 3, 50) as values:
        until = time.monotonic() + 10
        while len(made) < AHEAD and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == list(range(3, 3 + AHEAD))  # without being asked, and no more than these
        assert [next(values) for _ in range(10)] == [n * n for n in range(3, 13)]
        assert list(values) == [n * n for n in range(13, 50)]
        assert list(values) == []
    assert made == list(range(3, 50))


def test_what_fails_on_the_thread_is_raised_where_it_is_asked_for():
    def make(n):
        if n == 2:
            raise DataError("the disk is gone")
        return n

    with Ahead(make, 0, 9) as values:
        assert [next(values), next(values)] == [0, 1]
        with pytest.raises(DataError, match="the disk is gone"):
            next(values)


def test_no_thread_is_left_behind():
    before = threading.active_count()
    for first, stop in ((0, 1000), (5, 5), (0, 1)):
        with Ahead(lambda n: n, first, stop) as values:
            next(values, None)
    with pytest.raises(KeyboardInterrupt), Ahead(lambda n: n, 0, 100):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_leaving_does_not_wait_for_a_disk_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(gpt.data, "LEAVING", 0.05)
    answer = threading.Event()
    began = time.monotonic()
    try:
        with Ahead(lambda n: answer.wait(60), 0, 9):
            pass
        assert time.monotonic() - began < 30
    finally:
        answer.set()


# -------------------------------------------------------------------------------------------------------------- memory


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
