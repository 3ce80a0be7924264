"""The terminal: progress bars, and libraries that keep quiet."""

import contextlib
import logging
import os
import time
from collections.abc import Iterable

from tqdm import tqdm

from flatrl.bad_input import refusing

TELL_S = 60  # seconds between two lines of a bar in a file


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

    Nothing is drawn into a file. There, `update` prints a line once a minute. Without items and a
    total the bar is its title alone. `update` draws it anew once a second, also if nothing has
    changed."""

    monitor_interval = 0  # tqdm starts no thread

    def __init__(self, items: Iterable | None, title: str, **settings):
        self.title = title
        self.items_are = f"{settings.get('unit', 'item')}s"
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.started = self.last_told = time.monotonic()
        # None: no bar if the output is a file
        settings["disable"] = None if self.is_main else True
        if not items and not settings.get("total"):
            settings["bar_format"] = "{desc}"
        if isinstance(items, range):  # a resumed run's steps do not begin at 0
            settings |= {"initial": items.start, "total": items.stop}
        super().__init__(items, title, leave=False, mininterval=1, miniters=0, **settings)

    def update(self, n: int = 1):
        """Counts n more items."""
        if not self.disable:
            return super().update(n)
        self.n += n
        now = time.monotonic()
        if self.is_main and now - self.last_told >= TELL_S:
            self.last_told = now
            seconds = round(now - self.started)
            print(f"{self.title}: {self.n} of {self.total} {self.items_are} after {seconds} s")


@contextlib.contextmanager
def shown(title: str):
    """Shows a title while the block (or the decorated function) runs."""
    with Bar(None, title):
        yield
