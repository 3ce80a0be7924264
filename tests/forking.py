"""Runs a script that starts others, a launcher or a bench: `forking.py SCRIPT FLAGS`.

This process was forked from tests/zygote.py, so it has imported torch and vLLM. Scripts that it
starts with this Python by subprocess are forked in turn, so they need not import them again. So
are the processes of multiprocessing's "spawn"."""

import atexit
import concurrent.futures.thread
import inspect
import multiprocessing
import os
import subprocess
import sys

from zygote import REPO, leave, main_module, run_as_main

EXECUTE_CHILD = subprocess.Popen._execute_child


def fork_scripts() -> None:
    """Makes subprocess.Popen fork this process where a script is run with this Python."""
    subprocess.Popen._execute_child = execute_child
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")


def execute_child(popen: subprocess.Popen, args, *more) -> None:
    """Starts the process, in place of Popen's method."""
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
    """Runs a script in this process, a fork of another script's, and ends it."""
    atexit._clear()  # the other script's functions would delete its temporary folders
    concurrent.futures.thread._threads_queues.clear()  # the pools' threads are not in this process
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    os.chdir(cwd or os.getcwd())
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    for name, module in list(sys.modules.items()):  # the repository's modules are imported anew
        file = getattr(module, "__file__", None)
        if not file or name in ("zygote", "__main__"):
            continue
        # The environment may be in the repository's folder.
        if file.startswith(f"{REPO}/") and not file.startswith(f"{sys.prefix}/"):
            del sys.modules[name]
    leave(run_as_main(*main_module(argv)))


if __name__ == "__main__":
    fork_scripts()
    leave(run_as_main(*main_module(sys.argv[1:])))
