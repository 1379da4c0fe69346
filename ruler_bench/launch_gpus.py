"""GPUs of this machine, lent to the jobs of a sweep: each has one to itself.

A job sees its GPU alone, as `cuda:0`, since CUDA_VISIBLE_DEVICES is set before its process starts.
Who has which is told by locks on files, so that a job that is killed gives its GPU back.
"""

from __future__ import annotations

import fcntl
import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import OmegaConf

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = ("nv*", "kfd", "dxg")
"""Of NVIDIA's drivers, AMD's, and of both under WSL; without any there is no GPU."""
JOBS_WITHOUT_GPU = 2
LOOK_AGAIN_SECONDS = 0.2


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not any(one for name in DEVICE_FILES for one in Path("/dev").glob(name)):
        return ()
    import torch  # noqa: PLC0415 (seconds; only under launchers)

    return named(torch.cuda.device_count(), os.environ.get(VISIBLE))


def named(count: int, visible: str | None) -> tuple[str, ...]:
    """Return a name for each of `count` GPUs, of those that CUDA_VISIBLE_DEVICES lists if it does.

    CUDA stops at the first name that it does not know, so the first `count` are those it took.
    """
    if visible is None:
        return tuple(str(number) for number in range(count))
    return tuple(one.strip() for one in visible.split(",")[:count])


@contextmanager
def one_of(gpus: Sequence[str], folder: Path) -> Iterator[str]:
    """Own one of the GPUs that no other job owns; wait until there is one.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; at least one.
        folder: of the locks, the same for every job of the sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        locks = [
            stack.enter_context((folder / f"{number}.lock").open("w"))
            for number in range(len(gpus))
        ]
        while True:
            for gpu, lock in zip(gpus, locks, strict=True):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield gpu
                return
            time.sleep(LOOK_AGAIN_SECONDS)


def one_job_per_gpu() -> int:
    """Return how many jobs run at a time where each has a GPU; without GPUs two."""
    return len(visible_gpus()) or JOBS_WITHOUT_GPU


def gpus_of_ray_job(address: str | None) -> int:
    """Return how many GPUs a job asks of Ray: one, but none of a machine that has none.

    Args:
        address: of a cluster, whose GPUs are not seen from here; RAY_ADDRESS names one, too.
    """
    is_elsewhere = bool(address or os.environ.get("RAY_ADDRESS"))
    return 1 if is_elsewhere or visible_gpus() else 0


OmegaConf.register_new_resolver("one_job_per_gpu", one_job_per_gpu, replace=True)
OmegaConf.register_new_resolver("gpus_of_ray_job", gpus_of_ray_job, replace=True)
