"""Runs a script that starts others, such as a launcher or a bench: `forking.py SCRIPT FLAGS` is `python SCRIPT FLAGS`,
faster.

This process was forked from tests/zygote.py, so it has imported torch and vLLM. What the script starts with this Python
is forked in turn, instead of a Python that imports them again: another script, by subprocess.run or subprocess.Popen.
"""

import atexit
import concurrent.futures.thread
import inspect
import os
import subprocess
import sys

from zygote import REPO, leave, main_module, run_as_main

EXECUTE_CHILD = subprocess.Popen._execute_child


def fork_scripts() -> None:
    """From now on subprocess.Popen forks this process where a script is to be run with this Python."""
    subprocess.Popen._execute_child = execute_child


def execute_child(popen: subprocess.Popen, args, *more) -> None:
    """Is Popen's method that starts the process."""
    if args[0] != sys.executable:
        return EXECUTE_CHILD(popen, args, *more)
    given = inspect.signature(EXECUTE_CHILD).bind(popen, args, *more).arguments
    sys.stdout.flush()  # once, and not in both processes
    popen.pid = os.fork()
    if popen.pid == 0:
        if given["start_new_session"]:
            os.setsid()
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if given[name] != -1:
                os.dup2(given[name], number)
        try:
            start_script([word for word in args[1:] if word != "-u"], given["cwd"], given["env"])
        finally:
            os._exit(1)
    popen._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(given[name] for name in pipes))


def start_script(argv: list[str], cwd: str | None, env: dict | None) -> None:
    """Makes this process, which was forked from another script's, run a script as if it had just been started, and ends
    it."""
    atexit._clear()  # the other registered it: it would delete its temporary folders
    concurrent.futures.thread._threads_queues.clear()  # a thread of a pool is this process's only one
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # may be another kind of file now
    os.chdir(cwd or os.getcwd())
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    for name, module in list(sys.modules.items()):  # the repository's modules are imported anew
        file = getattr(module, "__file__", None)
        installed = file and file.startswith(f"{sys.prefix}/")  # the environment may be in the repository's folder
        if file and file.startswith(f"{REPO}/") and not installed and name not in ("zygote", "__main__"):
            del sys.modules[name]
    leave(run_as_main(*main_module(argv)))


if __name__ == "__main__":
    fork_scripts()
    leave(run_as_main(*main_module(sys.argv[1:])))
