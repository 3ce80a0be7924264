"""Imports torch, transformers and vLLM once, then forks a process for each run of a script.

These imports are nearly all the CPU time of a short run. Otherwise a forked process is like
`python SCRIPT ARGUMENTS`: session, arguments, environment, output and exit code are its own.

conftest.py starts this. A line of standard input asks for a process: JSON, with its arguments, its
environment, and a folder in which it writes the files `pid` and `output`, and at its end `status`,
as waitpid gives it. The end of the input ends this process."""

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import types
import warnings
from pathlib import Path

REPO = Path(__file__).parent.parent
# What train.py and the engine set before these imports.
os.environ |= {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which runs would inherit


def import_all() -> dict[str, str]:
    """Imports the packages that a run imports; returns the environment variables that they set."""
    before = dict(os.environ)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    import accelerate  # noqa: F401
    import compressed_tensors  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.core_model_loading  # noqa: F401
    import vllm.distributed.elastic_ep.elastic_execute  # noqa: F401
    import vllm.model_executor.models.qwen2  # noqa: F401
    import vllm.model_executor.models.transformers  # noqa: F401
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401
    import vllm.v1.core.sched.scheduler  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from vllm import LLM  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.platforms import current_platform

    get_checkpoint_conversion_mapping("qwen2")
    configure_logging(LoggingConfig())
    current_platform.register_triton_kernel_overrides()  # reads every name of every module
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)

    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def serve() -> dict:
    """Returns in the forked processes only: the request."""
    for line in sys.stdin:
        if os.fork() == 0:
            request = json.loads(line)
            if (child := os.fork()) == 0:
                return request
            _, status = os.waitpid(child, 0)
            note(request, "status", status)
            os._exit(0)
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    try:
        while True:  # so that their CPU time is this process's children's
            os.wait()
    except ChildProcessError:
        os._exit(0)


def note(request: dict, name: str, number: int) -> None:
    """Writes a file of the request's folder; it is never there without its content."""
    file = Path(request["folder"], name)
    file.with_suffix(".part").write_text(str(number))
    file.with_suffix(".part").rename(file)


def become(request: dict, imported: dict[str, str]) -> tuple:
    """Makes this process as if it had just been started; returns what main_module does."""
    os.setsid()
    note(request, "pid", os.getpid())
    with open(os.devnull) as nothing, open(Path(request["folder"], "output"), "w") as output:
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(imported | request["env"])
    os.chdir(os.environ.get("TESTS_START_IN", REPO))
    return main_module(request["argv"])


def main_module(argv: list[str]) -> tuple[types.CodeType, dict]:
    """Makes a new __main__ of the script argv[0]; returns its code and the module's names."""
    file = REPO / argv[0]
    sys.argv, sys.path[0] = argv, str(file.parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
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
    THIS = sys.modules["__main__"]  # its globals must live on
    IMPORTED = import_all()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a process with {len(tasks)} threads is not one to fork"
    gc.collect()
    gc.freeze()  # the collector would write to every object, and copy its page
    gc.unfreeze = lambda: None  # vLLM calls it at the end, and collects once more
    leave(run_as_main(*become(serve(), IMPORTED)))
