"""The terminal: progress bars, and libraries that keep quiet."""

import logging
import os
from collections.abc import Iterable

from tqdm import tqdm


def quiet_libraries():
    """Hides transformers' progress bars, and what vLLM and torch's checkpoints log.

    VLLM_LOGGING_LEVEL sets the least level that vLLM logs; by default it is ERROR."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving weights
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)
    logging.getLogger("torch.distributed.checkpoint").setLevel("ERROR")


class Bar(tqdm):
    """A progress bar on the main rank's terminal, which disappears at its end."""

    monitor_interval = 0  # tqdm starts no thread

    def __init__(self, items: Iterable | None, title: str, **settings):
        is_main = os.environ.get("RANK", "0") == "0"
        # None hides the bar if the output is a file.
        super().__init__(items, title, leave=False, disable=None if is_main else True, **settings)
