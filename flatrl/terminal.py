"""The terminal: bars that show what is at work, and libraries that keep quiet."""

import contextlib
import logging
import os

from tqdm import tqdm


def quiet_libraries():
    """Hides transformers' bars, and log lines below errors (or VLLM_LOGGING_LEVEL)."""
    from transformers.utils.logging import disable_progress_bar

    for name in ("torch.distributed.checkpoint", "vllm"):
        logging.getLogger(name).setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    disable_progress_bar()  # of loading and saving weights


class Bar(tqdm):
    """A bar on the main rank's terminal that disappears at its end; nothing goes into a file.

    It shows what is at work, how far it is and how long it will take. If neither items nor a
    total are given, it shows for how long the work has lasted. It is drawn anew every second,
    also while nothing counts."""

    # tqdm's own thread, one for this class, draws a bar anew whose last drawing is more than
    # `maxinterval` old, if its `miniters` is above 1.
    monitor = None
    monitor_interval = 1  # second
    miniters = property(lambda self: 2, lambda self, value: None)

    def __new__(cls, *args, **settings):
        # An error may have ended that thread. tqdm would wait for it for ever.
        if cls.monitor and not cls.monitor.is_alive():
            cls.monitor = None
        return super().__new__(cls, *args, **settings)

    def __init__(self, items, title, **settings):
        # None: where the output is a file
        settings["disable"] = os.environ.get("RANK", "0") != "0" or None
        if not items and not settings.get("total"):
            settings["bar_format"] = "{desc}: {elapsed}"
        # A terminal may say that it has no rows (script, CI): tqdm would draw nothing.
        super().__init__(items, title, leave=False, maxinterval=1, nrows=20, **settings)
        if getattr(self, "ncols", None) == -1:  # ... and no columns
            self.ncols = 79

    def __iter__(self):
        with self:
            for item in self.iterable:
                yield item
                self.update()


@contextlib.contextmanager
def shown(title: str):
    """Shows a title, and for how long, while the block (or the decorated function) runs."""
    with Bar(None, title):
        yield
