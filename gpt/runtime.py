"""Where and how a run computes: device, precision, threads, processes."""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from gpt.errors import ConfigError, NonFiniteError, UserError
from gpt.schema import RuntimeConfig

T = TypeVar("T")

# Dense bfloat16 peak of known GPUs in FLOP/s, from NVIDIA's data sheets; for MFU.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}


@dataclass
class Runtime:
    """What `start` found. `world` processes share each step; this is number `rank`."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world: int = 1
    device_name: str = "cpu"
    peak_flops: float | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def facts(self) -> dict:
        """What a run's status says about where and how it computed."""
        threads = torch.get_num_threads()
        return {"device": self.device_name, "dtype": self.precision, "threads": threads, "world": self.world}

    def autocast(self):
        """Low precision for matrix products where asked for; weights and sums stay float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.device.type != "cuda":
            return tuple(t.to(self.device) for t in tensors)
        return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in tensors)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Mean of a scalar over the processes."""
        if self.world > 1:
            torch.distributed.all_reduce(value)
            value /= self.world
        return value

    def own_rows(self, batch_size: int) -> range:
        """This process's rows of a batch that all processes share; raises ConfigError where it does not divide."""
        if batch_size % self.world:
            raise ConfigError("train.batch_size", batch_size, f"a multiple of the {self.world} processes")
        own = batch_size // self.world
        return range(self.rank * own, (self.rank + 1) * own)

    def agree(self, value: float | str | None) -> float | str | None:
        """What process 0 says, in all of them."""
        if self.world == 1:
            return value
        text = torch.zeros(64, dtype=torch.uint8)
        encoded = json.dumps(value).encode()
        text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        text = text.to(self.device)
        with self.together():
            torch.distributed.broadcast(text, 0)
        return json.loads(bytes(text.cpu().tolist()).rstrip(b"\0"))

    def first(self, work: Callable[[], T]) -> T:
        """Each process does `work`, process 0 before the others (who then find it done)."""
        if not self.main:
            self.barrier()
        result = work()
        if self.main:
            self.barrier()
        return result

    def parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose backward averages gradients over the processes."""
        if self.world == 1:
            return model
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[self.device.index] if self.device.type == "cuda" else None
        )

    def gradients(self, model: torch.nn.Module, last: bool):
        """Around one micro-step: only the last of a step needs the other processes' gradients."""
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()

    def mfu(self, flops: float) -> float | None:
        """Share of the GPUs' peak that `flops` a second are; None where the peak is not known."""
        return flops / (self.peak_flops * self.world) if self.peak_flops else None

    def barrier(self) -> None:
        if self.world > 1:
            with self.together():
                torch.distributed.barrier()

    @contextlib.contextmanager
    def together(self):
        """Around a wait for process 0: where it has ended with an error, it has said so, and the others end quietly."""
        try:
            yield
        except RuntimeError:
            if self.main:
                raise
            raise SystemExit(1) from None

    def peak_memory(self) -> int:
        """Largest memory so far in bytes: of the GPU, else of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource
        import sys

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def start(config: RuntimeConfig) -> Runtime:
    """Pick the device and precision, join the processes of a torchrun; ConfigError for what is not there."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    rank, world, local = (int(os.environ.get(key, d)) for key, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = pick_device(config.device, local)
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(hours=6),  # the others wait while process 0 prepares a corpus
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Runtime(device, pick_dtype(config.dtype, device), rank, world, name, peak_flops(name))


def peak_flops(name: str) -> float | None:
    """Peak of a GPU by its name, "NVIDIA H100 PCIe" for one; None where it is not known."""
    return next((flops for known, flops in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def stop(runtime: Runtime) -> None:
    if runtime.world > 1:
        torch.distributed.destroy_process_group()


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cuda":
        wanted = f"cuda:{local_rank}"
    if wanted.startswith("cuda") and int(wanted.split(":")[1]) >= torch.cuda.device_count():
        raise ConfigError("runtime.device", wanted, f"cpu, or one of {torch.cuda.device_count()} CUDA devices here")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("runtime.device", wanted, "auto | cpu: there is no MPS device here")
    return torch.device(wanted)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU that has it, float32 elsewhere (on a CPU bfloat16 is the slow one)."""
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


@contextlib.contextmanager
def room_for(what: str):
    """Around work that may need more memory than there is: raises UserError in one line, `what` says whose."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"out of memory: {what}") from None


def out_of_memory(error: BaseException) -> bool:
    """Whether a kernel or an allocator says so; a GPU's has a class of its own, the others only words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    absurd = ("Overflow when unpacking", "Storage size calculation overflowed", "Maximum allowed dimension")
    return any(word in str(error) for word in ("out of memory", "not enough memory", "DefaultCPUAllocator", *absurd))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Everything a step draws (dropout) is a function of (seed, step, rank), whatever ran before."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


def check_finite(step: int, **values: float) -> None:
    """Raises NonFiniteError naming what is NaN or infinite."""
    if not all(map(math.isfinite, values.values())):
        found = ", ".join(f"{key} is {value}" for key, value in values.items())
        advice = "lower optim.lr or set optim.grad_clip, in another sweep= or name="
        if step == 0:
            advice = "these are the weights before training: choose other model.*, position.* or runtime.dtype"
        raise NonFiniteError(f"step {step}: {found}; nothing of it is saved; {advice}")
