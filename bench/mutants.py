"""Changes one place of a file at random, again and again, and says which test notices each change.

    python bench/mutants.py                                   # 25 mutants of each of four files
    python bench/mutants.py --files data.py --mutants 10 --seed 1
    python bench/mutants.py --minutes 9 --out runs/mutants.jsonl      # repeat it: it goes on

A mutant is a copy of the repository with one change: a comparison or another operator, a `not`, a
condition, a number, True and False, min and max, two arguments, a returned value, or a statement
that is left out. Docstrings, messages, help texts, type hints and decorators stay as they are.

Without a change all tests of TESTS have to pass, or the bench ends. A mutant meets those of its
file, first the ones that name the changed function, slow ones last; the first that fails, or takes
longer than two minutes, has killed it. Only these tests count. Each mutant's are run in a process
that is forked from one that has imported torch and vLLM, and so are the runs of train.py in them.
"""

import argparse
import ast
import contextlib
import gc
import inspect
import json
import math
import os
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from common import BENCH, REPO

TESTS = {
    "data.py": "data units outputs log notices images hints demonstrations",
    "agent_loop.py": "agent_loop templates chat outputs words thinking refusals images log rollout",
    "rollout.py": "rollout async units outputs sampler images demonstrations hangs",
    "train.py": "algos bad_input notices log units sampler demonstrations refusals folder async cuda lora models train",
}
TEXTS = {"print", "warn", "say", "refusing", "BadInput"}  # calls whose arguments are messages
OPPOSITES = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
             ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
             ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"),
             ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"),
             ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and")}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
DROPPED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
LIMIT = 120  # seconds of a test

# ---------------------------------------------------------------- drawing


@dataclass
class Mutant:
    """A change: bytes start to end of a file become `new`. function: the innermost one around it;
    before, after: the expression or statement that it changes."""

    file: str
    line: int
    start: int
    end: int
    new: str
    function: str
    before: str
    after: str

    def __str__(self):
        return f"{self.file}:{self.line}  {self.before}  ->  {self.after}"

    def source(self) -> bytes:
        """Returns the file with the change."""
        whole = (REPO / self.file).read_bytes()
        return whole[: self.start] + self.new.encode() + whole[self.end :]


class Places:
    """Finds every place of a file that can be changed: `mutants`."""

    def __init__(self, file: str):
        self.file, self.source, self.mutants = file, (REPO / file).read_bytes(), []
        self.lines = [0]  # at which byte each begins
        for line in self.source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.visit(ast.parse(self.source), "")

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))].decode()

    def visit(self, node: ast.AST, function: str) -> None:
        """Notes the changes of a node, and those of its children."""
        for changed, (start, end), new in self.changes(node):
            first, last = self.span(changed)
            texts = [self.source[first:last], self.source[first:start] + new.encode() + self.source[end:last]]
            before, after = (" ".join(text.decode().split()) for text in texts)
            cut = max(0, len(os.path.commonprefix([before, after])) - 40)  # of a long one, what is near the change
            texts = before[cut:][:80], after[cut:][:80]
            self.mutants.append(Mutant(self.file, changed.lineno, start, end, new, function, *texts))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for child in children(node):
            self.visit(child, function)

    def changes(self, node: ast.AST) -> Iterator[tuple[ast.AST, tuple[int, int], str]]:
        """Yields the changes of a node: what is shown of it, the bytes that change, and what they become."""
        whole = self.span(node) if hasattr(node, "lineno") else None
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
                yield from self.swap_operator(node, op, left, right)
        elif isinstance(node, ast.BinOp):
            yield from self.swap_operator(node, node.op, node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                yield from self.swap_operator(node, node.op, left, right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, (whole[0], whole[0] + (3 if isinstance(node.op, ast.Not) else 1)), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, whole, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, whole, str(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, whole, NAMES[node.id]
        elif isinstance(node, ast.Return) and node.value and self.text(node.value) != "None":
            yield node, self.span(node.value), "None"
        elif isinstance(node, ast.Call) and name_of(node) not in {*TEXTS, *NAMES, "need", "flag", "preset"}:
            if len(node.args) > 1 and not any(isinstance(value, ast.Starred) for value in node.args[:2]):
                (start, middle), (after, end) = map(self.span, node.args[:2])
                first, second = map(self.text, node.args[:2])
                yield node, (start, end), second + self.source[middle:after].decode() + first
        statement = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Assign):  # of a name it would be noticed too easily
            statement = isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if isinstance(node, DROPPED) or statement and name_of(node.value) not in TEXTS:
            yield node, whole, "pass"
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not is_script(node):
            if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # these have a mutant like it
                yield node.test, self.span(node.test), f"not ({self.text(node.test)})"

    def swap_operator(self, node: ast.AST, op: ast.AST, left: ast.AST, right: ast.AST):
        """Yields the opposite of an operator between two nodes."""
        old, new = OPPOSITES.get(type(op), ("", ""))
        bytes_between = self.span(left)[1], self.span(right)[0]
        between = self.source[slice(*bytes_between)].decode()
        if old and re.search(rf"(?<!\w){re.escape(old)}(?!\w)", between):
            yield node, bytes_between, between.replace(old, new, 1)


def name_of(node: ast.AST) -> str:
    """Returns the last name of what a call calls, "" of another node."""
    func = getattr(node, "func", None)
    return getattr(func, "attr", getattr(func, "id", ""))


def is_script(node: ast.AST) -> bool:
    return "__name__" in ast.unparse(getattr(node, "test", ast.Constant(0)))


def children(node: ast.AST) -> list[ast.AST]:
    """Returns the children that are neither messages nor type hints."""
    name = name_of(node)
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom) or is_script(node):
        return []
    if isinstance(node, ast.Call):
        args = [] if name in TEXTS else node.args[:1] if name == "need" else node.args
        words = [word.value for word in node.keywords if {name, word.arg}.isdisjoint({*TEXTS, "strict", "help"})]
        return [node.func, *args, *words]
    fields = [value for field, value in ast.iter_fields(node)
              if field not in ("annotation", "returns", "decorator_list")]  # fmt: skip
    values = [value for field in fields for value in (field if isinstance(field, list) else [field])]
    return [value for value in values if isinstance(value, ast.AST)]


def draw(file: str, n: int, seed: int) -> list[Mutant]:
    """Returns n mutants of a file, each another change of its code."""
    found = sorted(Places(file).mutants, key=lambda mutant: (mutant.start, mutant.end, mutant.new))
    random.Random(f"{seed} {file}").shuffle(found)
    whole = ast.dump(ast.parse((REPO / file).read_bytes()))
    return [mutant for mutant in found[: 2 * n] if ast.dump(ast.parse(mutant.source())) != whole][:n]


# ---------------------------------------------------------------- the tests of a mutant


class Watch:
    """A pytest plugin: orders the tests, and notes what failed first and the seconds of each."""

    def __init__(self, function: str, slow: list[str], runs: socket.socket):
        self.function, self.slow, self.runs, self.failed, self.seconds = function, slow, runs, "", {}

    def pytest_collection(self):
        import conftest
        from hypothesis import Phase, settings

        # Runs of train.py are forked from a process of this bench; failing examples are not made smaller.
        conftest.ZYGOTE.append((SimpleNamespace(wait=lambda: None), self.runs))
        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items):
        names = re.compile(rf"\b{self.function or 'no name'}\b")
        items.sort(key=lambda item: (item.nodeid in self.slow, not names.search(inspect.getsource(item.function))))

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = self.failed or f"the import of {report.nodeid}"

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid


class Tester:
    """Tests a copy of the repository, in processes that are forked from this one."""

    def __init__(self, folder: Path):
        self.copy, self.log = folder / "flatrl", folder / "log.txt"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".hypothesis", ".*_cache")
        shutil.copytree(REPO, self.copy, ignore=left_out)
        commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a copy"]
        for words in (["init", "-q"], commit):  # a run writes down its commit
            subprocess.run(["git", *words], cwd=self.copy, check=True)
        os.environ.setdefault("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        sys.dont_write_bytecode = False  # or each mutant would compile all that did not change
        sys.path.insert(0, str(self.copy / "tests"))
        import hypothesis  # noqa: F401
        import pytest  # noqa: F401
        import zygote

        self.zygote = zygote
        self.zygote.REPO = self.copy  # under tests/test_bench.py it was imported before
        self.imported = zygote.import_all()
        gc.freeze()

    def test(self, tests: list[str], function: str, slow: list[str], limit: float) -> tuple[str, dict]:
        """Returns the test that failed first, "" if none has, and the seconds of all that were run.

        tests: files; function: whose tests come first; slow: tests that come last; limit: seconds."""
        answers, answer = os.pipe()
        runs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks = [os.fork()]
        if forks == [0]:  # of which conftest.py wants the runs of train.py
            runs.close()
            arguments = self.zygote.become(*self.zygote.serve(theirs), self.imported)
            self.zygote.leave(self.zygote.run_as_main(*arguments))
        theirs.close()
        forks.append(os.fork())
        if forks[1] == 0:
            os.close(answers)
            self.run_pytest(tests, Watch(function, slow, runs), answer)
        os.close(answer)
        runs.close()
        written = ""
        try:
            with os.fdopen(answers) as file:
                if select.select([file], [], [], limit)[0]:
                    written = file.read()
        finally:
            for pid in forks:
                kill(pid)
        return tuple(json.loads(written)) if written else ("a crash, or the time limit", {})

    def run_pytest(self, tests: list[str], watch: Watch, answer: int) -> None:
        """Is the process that runs the tests, and writes what `test` returns."""
        import pytest

        os.setsid()
        with self.log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(self.copy)
        others = [folder for folder in sys.path if Path(folder).resolve() not in (BENCH, REPO, REPO / "tests")]
        sys.path[:] = [str(self.copy), str(self.copy / "tests"), *others]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", f"--timeout={LIMIT}",
                   "-m", "not gpu"]  # fmt: skip
        code = pytest.main([*options, *tests], plugins=[watch])
        with os.fdopen(answer, "w") as file:
            json.dump([watch.failed or (f"the end, with code {code}" if code else ""), watch.seconds], file)
        os._exit(0)


def kill(pid: int) -> None:
    """Kills a child of this process, with all that it started."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.waitpid(pid, 0)


# ---------------------------------------------------------------- all of them


def measure(options, tester: Tester) -> None:
    """Tests the mutants that options.out does not have, and adds a line for each. Raises SystemExit if a
    test fails without a change."""
    done = read(options.out)
    end = time.monotonic() + 60 * options.minutes
    tests_of = {name: options.tests or [f"tests/test_{test}.py" for test in TESTS[name].split()]
                for name in options.files}  # fmt: skip
    all_tests = list(dict.fromkeys(test for tests in tests_of.values() for test in tests))
    base = done.get("no change", {"files": []})
    if not set(all_tests) <= set(base["files"]):
        start = time.monotonic()
        failed, seconds = tester.test(all_tests, "", [], 3600)
        if failed:
            sys.exit(f"{tester.log.read_text()[-3000:]}\nwithout a change {failed} fails")
        base = {"files": all_tests, "slow": [test for test, took in seconds.items() if took > 2],
                "seconds": time.monotonic() - start}  # fmt: skip
        write(options.out, "no change", base)
        print(f"no change: {len(seconds)} tests pass in {base['seconds']:.0f} s", flush=True)
    for name in options.files:
        for number, mutant in enumerate(draw(name, options.mutants, options.seed), 1):
            if str(mutant) in done or time.monotonic() > end:
                continue
            (tester.copy / name).write_bytes(mutant.source())
            os.utime(tester.copy / name, (number, number))  # another time: the last one's bytecode is not its own
            start = time.monotonic()
            limit = 3 * base["seconds"] + LIMIT
            failed, seconds = tester.test(tests_of[name], mutant.function, base["slow"], limit)
            took = round(time.monotonic() - start)
            write(options.out, str(mutant), {"killed_by": failed, "tests": len(seconds), "seconds": took})
            ending = f"killed by {failed}" if failed else f"survived {len(seconds)} tests"
            print(f"{mutant}\n    {ending}  ({took} s)", flush=True)
        shutil.copy(REPO / name, tester.copy / name)


def write(out: Path, name: str, result: dict) -> None:
    with out.open("a") as file:
        file.write(json.dumps({"mutant": name} | result) + "\n")


def read(out: Path) -> dict[str, dict]:
    """Returns the lines of the file by their mutant."""
    if not out.exists():
        return {}
    lines = [json.loads(line) for line in out.open()]
    return {line["mutant"]: line for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(TESTS), choices=TESTS)
    parser.add_argument("--mutants", type=int, default=25, help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="test files, in place of those of TESTS")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so many")
    parser.add_argument("--out", type=Path, help="a file of results, which is not repeated but gone on with")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())  # not a TemporaryDirectory: a forked process would delete it at its end
    options.out = options.out or folder / "mutants.jsonl"
    try:
        tester = Tester(folder)
        measure(options, tester)
        results = read(options.out)
    finally:
        shutil.rmtree(folder)
    for name in options.files:
        mutants = [str(mutant) for mutant in draw(name, options.mutants, options.seed) if str(mutant) in results]
        survivors = [mutant for mutant in mutants if not results[mutant]["killed_by"]]
        print(f"{name}: {len(mutants) - len(survivors)} of {len(mutants)} killed")
        for mutant in survivors:
            print(f"    survived {results[mutant]['tests']} tests: {mutant}", flush=True)
    tester.zygote.leave(0)


THIS = sys.modules["__main__"]  # its globals live on in the processes that are forked
if __name__ == "__main__":
    main()
