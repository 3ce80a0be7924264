"""Refuses alarms outside the main thread, where they can't work and where tools and rewards run.

math_verify and others limit their time by SIGALRM. In a thread that is an error, which they take
for a wrong answer, and then every reward is 0. Importing this module replaces signal.signal."""

import signal
import threading

from flatrl.bad_input import BadReward

REMEDY = (
    "a reward or a tool uses signal.alarm, which works in the main thread only, and they run in "
    "others. Turn that time limit off (math_verify: parsing_timeout=None and "
    "timeout_seconds=None), or grade in a process of its own"
)
REFUSED = threading.Event()  # an alarm was refused in this process
SIGNAL = signal.signal


def refuse_alarms():
    """Raises BadReward if an alarm was refused, because graders may hide the error."""
    if REFUSED.is_set():
        raise BadReward(REMEDY)


def _in_main_thread(number, handler):
    """Replaces signal.signal: notes that another thread wants an alarm, which is an error there."""
    if number == signal.SIGALRM and threading.current_thread() is not threading.main_thread():
        REFUSED.set()
    return SIGNAL(number, handler)


signal.signal = _in_main_thread
