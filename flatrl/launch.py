"""The process: what torch needs before it is imported, quiet libraries, progress bars."""

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm


def prepare_process():
    """Sets what torch reads when it is imported: threads on a CPU, the allocator on a GPU.

    Until training begins, Ctrl-C ends the process without a traceback. Lines come out at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    if os.environ.get("RANK", "0") == "0":
        print("flatrl: loading torch, transformers and vLLM")
    gc.set_threshold(50_000)  # looking for garbage takes a tenth of the imports' time
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    if os.path.exists("/dev/nvidiactl"):
        # Micro-batches differ in size, and would leave holes in the GPU's memory. With --tp,
        # vLLM can't capture CUDA graphs with it (vllm#42609).
        has_tp = any(word.startswith("--tp") for word in sys.argv)
        if not has_tp and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    else:
        # Ranks that share cores crawl if each starts a thread for every core.
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        n_threads = max(1, n_cores() // n_ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))


def n_cores() -> int:
    """Returns how many cores this process may use, by its affinity and its container's quota."""
    n_allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # without cgroups of version 2, or a quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return max(1, min(n_allowed, quota // period))
    return n_allowed


def quiet_libraries():
    """Hides libraries' progress bars and logs; vLLM's below VLLM_LOGGING_LEVEL (ERROR)."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    logging.getLogger("torch.distributed.checkpoint").setLevel("ERROR")


class Bar(tqdm):
    """A progress bar on the main rank's terminal, which disappears at its end."""

    monitor_interval = 0  # tqdm starts no thread

    def __init__(self, items: Iterable | None, title: str, **settings):
        disable = None if os.environ.get("RANK", "0") == "0" else True  # None: only on a terminal
        super().__init__(items, title, leave=False, disable=disable, **settings)
