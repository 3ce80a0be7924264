"""Prepares a process before torch is imported."""

import gc
import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def prepare_process():
    """Prints that the slow imports begin, and sets the number of threads for ranks on a CPU."""
    if os.environ.get("RANK", "0") == "0":
        print("flatrl: loading torch, transformers and vLLM", flush=True)
    gc.set_threshold(50_000)  # looking for garbage takes a tenth of the imports' time

    # Ranks that share cores crawl if each starts a thread for every core. On a GPU vLLM sets it.
    if not os.path.exists("/dev/nvidiactl"):
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        n_threads = max(1, len(os.sched_getaffinity(0)) // n_ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))
