"""The first second of a run: its first line, and what has to be set before torch is imported."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def begin():
    """Says on the main rank what takes the first seconds, and sets the number of threads."""
    if os.environ.get("RANK", "0") == "0":
        print("flatrl: loading torch, transformers and vLLM", flush=True)
    # Ranks that share cores with busy-waiting threads crawl. On a GPU vLLM sets this.
    if not os.path.exists("/dev/nvidiactl"):
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
