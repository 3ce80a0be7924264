"""Imports torch, transformers and vLLM once, then forks a process for each run of a script.

These imports are nearly all the CPU time of a short run. Otherwise a forked process is like
`python SCRIPT ARGUMENTS`: session, arguments, environment, output and exit code are its own.

conftest.py starts the zygote. Forked asks it for a process: a line of its standard input names a
folder with the file `request`, in which the files `pid` and `output` are written, and at the end of
the process `status`, as waitpid gives it. The end of the input ends the zygote."""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

REPO = Path(__file__).parent.parent
HANGS = 300  # seconds after which something hangs: many times what a slow machine needs
# What train.py and the engine set before these imports.
BEFORE = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def wait_for(condition, seconds: float = HANGS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


class Forked:
    """A process that the zygote forked, with the methods of subprocess.Popen that tests use."""

    def __init__(self, *argv, env: dict[str, str], folder: Path):
        self.returncode = None
        self.folder = Path(tempfile.mkdtemp(dir=folder, prefix="process"))
        request = {"argv": list(map(str, argv)), "env": env}
        (self.folder / "request").write_text(json.dumps(request))
        with open(os.environ["TESTS_ZYGOTE"], "w") as requests:
            print(self.folder, file=requests)
        wait_for((self.folder / "pid").exists)
        self.pid = int((self.folder / "pid").read_text())

    def poll(self) -> int | None:
        status = self.folder / "status"
        if status.exists():
            self.returncode = os.waitstatus_to_exitcode(int(status.read_text()))
        return self.returncode

    def wait(self, timeout: float = HANGS) -> str:
        """Returns what it has printed up to its end."""
        wait_for(lambda: self.poll() is not None, timeout)
        return self.printed()

    def printed(self) -> str:
        """Returns what it has printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


MODULES = """
    accelerate compressed_tensors peft torch.distributed.checkpoint.state_dict
    torch.distributed.fsdp transformers.core_model_loading transformers.optimization
    vllm.distributed.elastic_ep.elastic_execute vllm.model_executor.models.qwen2
    vllm.model_executor.models.transformers vllm.v1.attention.backends.cpu_attn
    vllm.v1.core.sched.scheduler vllm.v1.worker.cpu_worker"""


def import_all() -> dict[str, str]:
    """Imports the packages that a run imports; returns the environment variables that they set."""
    before = dict(os.environ)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    for module in MODULES.split():
        importlib.import_module(module)
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from vllm import LLM  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.platforms import current_platform

    get_checkpoint_conversion_mapping("qwen2")
    configure_logging(LoggingConfig())
    current_platform.register_triton_kernel_overrides()  # reads every name of every module
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
    # Of an engine that ranks share; to compile it takes 8 s.
    masked = vocab_parallel_embedding.get_masked_input_and_mask.__wrapped__
    vocab_parallel_embedding.get_masked_input_and_mask = masked

    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def serve() -> Path:
    """Returns in the forked processes only: the folder with the request."""
    for line in sys.stdin:
        if os.fork() == 0:
            folder = Path(line.strip())
            if (child := os.fork()) == 0:
                return folder
            _, status = os.waitpid(child, 0)
            note(folder / "status", status)
            os._exit(0)
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    try:
        while True:  # so that their CPU time is this process's children's
            os.wait()
    except ChildProcessError:
        os._exit(0)


def note(file: Path, number: int) -> None:
    """Writes a file, which is never there without its content."""
    file.with_suffix(".part").write_text(str(number))
    file.with_suffix(".part").rename(file)


def become(folder: Path, imported: dict[str, str]) -> tuple:
    """Makes this process as if it had just been started; returns what main_module does."""
    os.setsid()
    note(folder / "pid", os.getpid())
    request = json.loads((folder / "request").read_text())
    to_read = os.open(os.devnull, os.O_RDONLY)
    to_write = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, opened in enumerate((to_read, to_write, to_write)):
        os.dup2(opened, number)
    os.close(to_read)
    os.close(to_write)
    sys.stdin = open(0, closefd=False)  # without what was read ahead
    os.environ.clear()
    os.environ.update(imported | request["env"])
    os.chdir(os.environ.pop("TESTS_START_IN", REPO))
    return main_module(request["argv"])


def main_module(argv: list[str]) -> tuple[types.CodeType, dict]:
    """Makes a new __main__ of the script argv[0]; returns its code and the module's names.

    argv: or -u, -c, the code, and its arguments."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if argv[0] == "-u":
        sys.argv, sys.path[0] = ["-c", *argv[3:]], ""
        return compile(argv[2], "<string>", "exec"), vars(main)
    file = REPO / argv[0]
    sys.argv, sys.path[0] = argv, str(file.parent)
    main.__file__ = str(file)
    return compile(file.read_bytes(), str(file), "exec"), vars(main)


def run_as_main(code: types.CodeType, namespace: dict) -> int:
    """Runs a script's code, prints what it raised as Python does, and returns its exit code."""
    try:
        exec(code, namespace)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return 0


def leave(exit_code: int) -> None:
    """Ends this process as Python does, but frees no imported module, which would take 3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, which runs would inherit
    THIS = sys.modules["__main__"]  # its globals must live on
    gc.disable()  # which takes two seconds from the imports
    IMPORTED = import_all()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a process with {len(tasks)} threads is not one to fork"
    gc.collect()
    gc.freeze()  # the collector would write to every object, and copy its page
    gc.unfreeze = lambda: None  # vLLM calls it at the end, and collects once more
    gc.enable()
    leave(run_as_main(*become(serve(), IMPORTED)))
