"""Prepares a process before torch is imported."""

import errno
import gc
import io
import os
import signal
import sys
import tempfile

# What launchers set for each process.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What MPI sets. accelerate would take the number of processes from it.
MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def prepare_process():
    """Sets what a job or a shell may have left wrong: standard streams, variables, home, threads.

    Prints that the slow imports begin, and sets what torch reads when it is imported. From here on
    Ctrl-C ends the process at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_standard_streams()
    forget_other_launchers()
    if os.environ.get("RANK", "0") == "0":
        print("flatrl: loading torch, transformers and vLLM")
    give_home()
    gc.set_threshold(50_000)  # looking for garbage takes a tenth of the imports' time

    if os.path.exists("/dev/nvidiactl"):
        # Micro-batches differ in size, and would leave holes in the GPU's memory. With --tp,
        # vLLM can't capture CUDA graphs with it (vllm#42609).
        has_tp = any(word.startswith("--tp") for word in sys.argv)
        if not has_tp and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    else:
        # Ranks that share cores crawl if each starts a thread for every core.
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        n_threads = max(1, len(os.sched_getaffinity(0)) // n_ranks)
        os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(n_threads)


def open_standard_streams():
    """Makes standard streams that can be written to, whatever becomes of their readers.

    A stream that is closed is connected to no file. Otherwise a file of the run would get its
    number, and what libraries print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
    sys.stdout = Stream(sys.stdout)
    sys.stderr = Stream(sys.stderr)


class Stream(io.TextIOWrapper):
    """Takes the place of a standard stream. Each line appears at once, in any encoding.

    When the reader of a pipe or the terminal has gone, as in `train.py | head`, it writes to no
    file from then on."""

    def __init__(self, stream: io.TextIOWrapper):
        settings = dict(line_buffering=True, write_through=stream.write_through)
        super().__init__(stream.detach(), stream.encoding, "backslashreplace", **settings)

    def write(self, text: str) -> int:
        """Writes a text, or drops it if the reader is gone. Raises OSError for a full disk."""
        try:
            return super().write(text)
        except OSError:
            self.flush()  # meets the same error, and judges it
            return len(text)

    def flush(self):
        """Writes what is left. If the reader is gone, this text and all later ones are dropped."""
        try:
            super().flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            super().flush()


def forget_other_launchers():
    """Removes the launchers' variables that an earlier job or a shell has left behind.

    Of LAUNCHER these are the empty ones, and in a process that is alone all. Of MPI all go."""
    is_alone = os.environ.get("WORLD_SIZE", "") in ("", "1")
    for name in LAUNCHER:
        if is_alone or not os.environ.get(name):
            os.environ.pop(name, None)
    for name in MPI:
        os.environ.pop(name, None)


def give_home():
    """Makes a home for a user who has none, because libraries keep caches there.

    That is a user without HOME and without an entry in passwd, or with a home that does not
    exist or can't be written. Containers give such a user "/", or root's."""
    if os.access(os.path.expanduser("~"), os.W_OK):
        return
    os.environ["HOME"] = os.path.join(tempfile.gettempdir(), f"flatrl-{os.getuid()}")
    os.environ.setdefault("USER", str(os.getuid()))  # torch asks for the user's name
    os.makedirs(os.environ["HOME"], mode=0o700, exist_ok=True)
    if os.environ.get("RANK", "0") == "0":
        print(f"there is no home folder to write to: HOME is {os.environ['HOME']}")
