"""Refuses alarms outside the main thread, where they can't work and where tools and rewards run.

math_verify and others limit their time by SIGALRM. In a thread that is an error, which they take
for a wrong answer, and then every reward is 0. Importing this module replaces three functions of
`signal`."""

import signal
import threading

from flatrl.bad_input import BadReward

REMEDY = (
    "a reward or a tool uses signal.alarm, which works in the main thread only, and they run in "
    "others. Turn that time limit off (math_verify: parsing_timeout=None and "
    "timeout_seconds=None), or grade in a process of its own"
)
REFUSED = threading.Event()  # an alarm was refused in this process


def refuse_alarms():
    """Raises BadReward if an alarm was refused, because graders may hide the error."""
    if REFUSED.is_set():
        raise BadReward(REMEDY)


def _in_main_thread(function):
    """Returns a function of `signal` that raises BadReward for an alarm of another thread."""

    def checked(number, *arguments):
        is_alarm = function is not SIGNAL or number == signal.SIGALRM
        if is_alarm and threading.current_thread() is not threading.main_thread():
            REFUSED.set()
            raise BadReward(REMEDY)
        return function(number, *arguments)

    return checked


SIGNAL = signal.signal
signal.signal = _in_main_thread(SIGNAL)
signal.alarm = _in_main_thread(signal.alarm)
signal.setitimer = _in_main_thread(signal.setitimer)
