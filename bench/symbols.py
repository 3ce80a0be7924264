"""Says what flatrl uses of vLLM that a version of vLLM does not have, without installing it.

    python bench/symbols.py                       # the vLLM that is installed
    python bench/symbols.py vllm-0.25.1-*.whl     # from pip download --no-deps vllm==0.25.1
    python bench/symbols.py FOLDER                # a folder that has vllm/

Only Python sources are read, nothing of vLLM is imported. Checked are

    imports     every module, name and attribute of these that the five files, flatrl/ and
                examples/ import or use, found in their syntax trees
    arguments   that vllm.LLM and SamplingParams are given, found likewise; environment
                variables
    OBJECTS     attributes and methods of the objects that vLLM hands out, which no syntax
                tree tells: the table below, whose every name must occur in flatrl's sources

A name that is there may still mean something else: what it does is for the tests. Exit code 1:
something is missing.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import common

# module:class -> its attributes and methods that flatrl uses; of a method also the arguments, in brackets.
OBJECTS = {
    "vllm.entrypoints.llm:LLM": "llm_engine apply_model(func)",
    "vllm.v1.engine.llm_engine:LLMEngine": """model_config vllm_config engine_core output_processor step
        reset_prefix_cache reset_encoder_cache wake_up(tags) sleep(level,mode) abort_request(request_ids)
        add_request(request_id,prompt,params)""",
    "vllm.v1.engine.core_client:InprocClient": "engine_core shutdown",
    "vllm.v1.engine.core:EngineCore": "scheduler",
    "vllm.v1.core.sched.scheduler:Scheduler": "waiting kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "usage",
    "vllm.v1.request:Request": "num_tokens",
    "vllm.v1.engine.output_processor:OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor:RequestState": "external_req_id detokenizer",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "num_output_tokens",
    "vllm.outputs:RequestOutput": "finished request_id outputs prompt_token_ids num_cached_tokens",
    "vllm.outputs:CompletionOutput": "token_ids finish_reason logprobs",
    "vllm.logprobs:FlatLogprobs": "logprobs",
    "vllm.config:VllmConfig": "model_config cache_config",
    "vllm.config:CacheConfig": "num_gpu_blocks block_size",
    "vllm.config:ModelConfig": "get_vocab_size",
    "vllm.engine.arg_utils:EngineArgs": "create_engine_config",
    "vllm.model_executor.layers.linear:ColumnParallelLinear": "output_partition_sizes",
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": "load_numel",
    "vllm.distributed.parallel_state:GroupCoordinator": "world_size",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser": "extract_tool_calls(model_output,request)",
    "vllm.tool_parsers.abstract_tool_parser:ExtractedToolCallInformation": "tools_called tool_calls",
}
OUR_FILES = [*common.REPO.glob("*.py"), *common.REPO.glob("flatrl/*.py"), *common.REPO.glob("examples/*.py")]
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Version:
    """The Python sources of one vLLM: read(path) -> text, or None where there is no such file."""

    def __init__(self, place: str):
        self.name = Path(place).name
        if place.endswith(".whl"):
            wheel = zipfile.ZipFile(place)
            self.files = set(wheel.namelist())
            self.read = lambda path: wheel.read(path).decode() if path in self.files else None
        else:
            folder = Path(place)
            self.read = lambda path: (folder / path).read_text() if (folder / path).is_file() else None
        if self.read("vllm/__init__.py") is None:
            raise SystemExit(f"bench/symbols.py: error: {place} has no vllm/__init__.py")
        self.tree = cache(self.tree)

    def tree(self, module: str) -> ast.Module | None:
        """Returns the syntax tree of a dotted module, None where there is none."""
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            text = self.read(file)
            if text is not None:
                return ast.parse(text)
        return None

    def find(self, module: str, name: str, depth: int = 6) -> tuple[str, ast.AST] | None:
        """Returns (module, node) of what a module defines, imports or exports lazily by a
        name."""
        tree = self.tree(module)
        if tree is None or depth == 0:
            return None
        for node in ast.walk(tree):
            if isinstance(node, SCOPES) and node.name == name and node in top_level(tree):
                return module, node
            if isinstance(node, ast.Assign) and any(getattr(x, "id", None) == name for x in node.targets):
                return module, node
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self.absolute(module, node)
                        return self.find(source, alias.name, depth - 1) or (
                            (f"{source}.{alias.name}", node) if self.tree(f"{source}.{alias.name}") else None
                        )
                    if alias.name == "*" and (place := self.find(self.absolute(module, node), name, depth - 1)):
                        return place
            if isinstance(node, ast.Dict):  # vllm/__init__.py: {"LLM": ".entrypoints.llm:LLM"}
                for key, value in zip(node.keys, node.values):
                    if getattr(key, "value", None) == name and ":" in str(getattr(value, "value", "")):
                        source, _, symbol = value.value.partition(":")
                        return self.find(f"{module}{source}" if source.startswith(".") else source, symbol, depth - 1)
        return None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the module that `from ... import` names, also where that is relative."""
        if not node.level:
            return node.module
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def members(self, module: str, node: ast.ClassDef, depth: int = 6) -> dict[str, ast.AST]:
        """Returns what objects of a class have, by name: of the class, of its bases, and what
        methods assign to self."""
        found = {}
        for base in node.bases if depth else ():
            place = isinstance(base, ast.Name) and self.find(module, base.id)
            if place and isinstance(place[1], ast.ClassDef):
                found |= self.members(*place, depth - 1)
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                if getattr(child.value, "id", None) in ("self", "cls"):
                    found.setdefault(child.attr, child)
        for child in node.body:
            if isinstance(child, SCOPES):
                found[child.name] = child
            elif isinstance(child, ast.AnnAssign):
                found[child.target.id] = child
            elif isinstance(child, ast.Assign):
                found |= {target.id: child for target in child.targets if isinstance(target, ast.Name)}
        return found


def top_level(tree: ast.Module) -> set[ast.AST]:
    """Returns a module's own statements, and those under its if, try and with."""
    found = set()
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        found.add(node)
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            waiting += ast.iter_child_nodes(node)
    return found


def arguments(function: ast.AST) -> set[str]:
    """Returns the names of a function's arguments; with **kwargs every name would do: {"**"}."""
    a = function.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
    return names | ({"**"} if a.kwarg else set())


def imported(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (module, name, attribute) of vLLM that a file of ours uses; name and attribute may
    be ""."""
    tree = ast.parse(file.read_text())
    aliases = {}  # our name -> (module, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    aliases[alias.asname or alias.name] = (alias.name, "")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                aliases[alias.asname or alias.name] = (node.module, alias.name)
    for module, name in aliases.values():
        yield module, name, ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield *aliases[node.value.id], node.attr


def engine_arguments() -> set[str]:
    """Returns the arguments of vllm.LLM that flatrl.vllm_engine gives."""
    from flatrl import vllm_engine

    tree = ast.parse(Path(vllm_engine.__file__).read_text())
    function = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "vllm_arguments")
    names = {"enable_sleep_mode"}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            names |= {keyword.arg for keyword in node.keywords}
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "arguments":
            names.add(node.slice.value)
    return names - {"use_tqdm_on_load"}  # of LLM itself, no field


def sampling_parameters() -> set[str]:
    from flatrl import vllm_engine

    more = "flat_logprobs structured_outputs allowed_token_ids logit_bias"
    return vllm_engine.FIXED_SAMPLING | vllm_engine.NEUTRAL_SAMPLING | set(more.split())


def missing(version: Version) -> list[str]:
    """Returns what flatrl uses that this vLLM does not have, a line each."""
    lines = []

    def wants(module: str, name: str, attribute: str, user: str):
        if version.tree(module) is None:
            lines.append(f"module {module} ({user})")
            return
        if not name and not attribute:
            return
        place = version.find(module, name or attribute)
        if place is None and version.tree(f"{module}.{name}") is not None:
            place = f"{module}.{name}", None  # `from package import module`
        if place is None:
            lines.append(f"{module}.{name or attribute} ({user})")
        elif name and attribute:
            home, node = place
            if isinstance(node, ast.ClassDef):
                known = version.members(home, node)
                is_enum = any(getattr(base, "id", "").endswith("Enum") for base in node.bases)
                if attribute not in known and not is_enum and attribute not in ("__init__", "__dataclass_fields__"):
                    lines.append(f"{module}.{name}.{attribute} ({user})")
            elif version.tree(home) is not None and not isinstance(node, (ast.FunctionDef, ast.Assign)):
                if version.find(home, attribute) is None:
                    lines.append(f"{home}.{attribute} ({user})")

    for file in OUR_FILES:
        for use in sorted(set(imported(file))):
            wants(*use, str(file.relative_to(common.REPO)))

    ours = "\n".join(file.read_text() for file in OUR_FILES)
    for place, uses in OBJECTS.items():
        module, _, name = place.partition(":")
        found = version.find(module, name)
        if found is None:
            lines.append(f"{module}.{name}")
            continue
        known = version.members(*found)
        for attribute, given in re.findall(r"(\w+)(?:\(([\w,]*)\))?", uses):
            assert re.search(rf"\b{attribute}\b", ours), f"OBJECTS: flatrl does not use {attribute}"
            if attribute not in known:
                lines.append(f"{module}.{name}.{attribute}")
            elif isinstance(known[attribute], (ast.FunctionDef, ast.AsyncFunctionDef)):
                takes = arguments(known[attribute])
                absent = {argument for argument in given.split(",") if argument} - takes
                if absent and "**" not in takes:
                    lines.append(f"{module}.{name}.{attribute}: no argument {', '.join(sorted(absent))}")

    for module, name, wanted in (("vllm.engine.arg_utils", "EngineArgs", engine_arguments()),
                                 ("vllm.sampling_params", "SamplingParams", sampling_parameters())):  # fmt: skip
        found = version.find(module, name)
        known = version.members(*found) if found else {}
        lines += [f"{name}: no field {field}" for field in sorted(wanted - known.keys())]
    variables = version.read("vllm/envs.py") or ""
    for variable in sorted(set(re.findall(r"\bVLLM_[A-Z_0-9]+\b", ours)) - {"VLLM_DIST_IDENT"}):
        if variable not in variables:
            lines.append(f"environment variable {variable}")
    return list(dict.fromkeys(lines))


def installed() -> str:
    """Returns the folder that has the installed vllm/, which is not imported."""
    from importlib.util import find_spec

    return str(Path(find_spec("vllm").origin).parents[1])


def main(places: list[str]) -> int:
    """Prints a line for each vLLM, and what it lacks; returns the exit code."""
    n_missing = 0
    for place in places or [installed()]:
        version = Version(place)
        lines = missing(version)
        n_missing += len(lines)
        print(f"{version.name}: {len(lines)} missing")
        for line in lines:
            print(f"    {line}")
    return int(n_missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
