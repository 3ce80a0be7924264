"""The terminal: progress bars, and libraries that keep quiet."""

import contextlib
import logging
import os
from collections.abc import Iterable

from tqdm import tqdm

from flatrl.bad_input import refusing


def quiet_libraries():
    """Hides transformers' progress bars, and log lines of vLLM and torch's checkpoints.

    Lines below VLLM_LOGGING_LEVEL are hidden, which is ERROR by default. Raises BadInput if it is
    no level."""
    from transformers.utils.logging import disable_progress_bar

    level = os.environ.get("VLLM_LOGGING_LEVEL") or "ERROR"
    os.environ["VLLM_LOGGING_LEVEL"] = level.upper()
    with refusing("VLLM_LOGGING_LEVEL"):
        for name in ("torch.distributed.checkpoint", "vllm"):
            logging.getLogger(name).setLevel(level.upper())
    disable_progress_bar()  # of loading and saving weights


class Bar(tqdm):
    """A progress bar on the main rank's terminal, which disappears at its end.

    Nothing is drawn into a file. Without items and a total the bar is its title alone. `update`
    draws it anew once a second, also if nothing has changed."""

    monitor_interval = 0  # tqdm starts no thread

    def __init__(self, items: Iterable | None, title: str, **settings):
        # None: no bar if the output is a file
        settings["disable"] = os.environ.get("RANK", "0") != "0" or None
        if not items and not settings.get("total"):
            settings["bar_format"] = "{desc}"
        if isinstance(items, range):  # a resumed run's steps do not begin at 0
            settings |= {"initial": items.start, "total": items.stop}
        super().__init__(items, title, leave=False, mininterval=1, miniters=0, **settings)


@contextlib.contextmanager
def shown(title: str):
    """Shows a title while the block (or the decorated function) runs."""
    with Bar(None, title):
        yield
