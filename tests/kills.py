"""`kills.py N VICTIM FLAGS` is train.py, whose rank VICTIM is killed in a save.

It gets SIGKILL just before its N-th operation on a file under checkpoints/; 0 means never."""

import os
import runpy
import signal
import sys
from pathlib import Path

REPO = Path(__file__).parent.parent


def die_at(n: int) -> None:
    """Kills this process before its n-th operation on a path under checkpoints/."""
    n_left = n

    def hook(event: str, arguments: tuple) -> None:
        nonlocal n_left
        if not event.startswith(("open", "os.", "shutil.")):
            return
        if any("/checkpoints/" in f"{argument}/" for argument in arguments[:2]):
            n_left -= 1
            if n_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    n, victim = map(int, sys.argv[1:3])
    if n and int(os.environ["RANK"]) == victim:
        die_at(n)
    sys.argv = ["train.py", *sys.argv[3:]]
    sys.path[0] = str(REPO)
    runpy.run_path(str(REPO / "train.py"), run_name="__main__")
