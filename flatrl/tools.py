"""Python functions as tools, what models read of results, and the tool calls in a model's text."""

import copy
import functools
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from os.path import commonprefix
from types import SimpleNamespace
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from flatrl.bad_input import BadInput
from flatrl.chat_template import call_id, chat_template, function_call
from flatrl.user_code import clean

# ---------------------------------------------------------------- functions


class RefusedCallError(ValueError):
    """A tool call that is wrong, or beyond a limit. It is the model's fault, not the tool's."""


class Signature:
    """How a model calls a Python function: its name, its schema, and its arguments.

    Type hints and a Google-style docstring give the schema, as transformers' `get_json_schema`
    writes it. Raises BadInput if there is none, or if the function can't be called by it."""

    # For pydantic: the model may write 3 for a str, but neither NaN nor Infinity.
    CONFIG = {"coerce_numbers_to_str": True, "allow_inf_nan": False}

    def __init__(self, function: Callable):
        from transformers.utils import get_json_schema  # --help need not wait for it

        self.name = getattr(function, "__name__", repr(function))
        try:
            self.schema = get_json_schema(function)
            properties = self.schema["function"]["parameters"]["properties"]
            hints = get_type_hints(function)
            self.adapters = {}
            for name, property in properties.items():
                adapter = TypeAdapter(hints[name], config=self.CONFIG)
                self.adapters[name] = adapter
                if property.get("type") == "object":  # also what transformers does not know: enums
                    property |= adapter.json_schema()
                if not {"type", "enum"} & property.keys():
                    raise ValueError(f"the type hint of {name!r} has more than one JSON type")
            self.signature = inspect.signature(function)
            self.signature.bind(**dict.fromkeys(properties))
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            raise BadInput(
                f"the function {self.name!r} can't be a tool: {reason} (a tool needs type hints, a "
                "Google-style docstring, and arguments that can be passed by name)"
            ) from error

    def arguments(self, given: dict, fixed: dict) -> dict:
        """Returns the keyword arguments of a call: the model's as their type hints, and the row's.

        given: the model's. fixed: the row's, which win. Raises RefusedCallError."""
        values = given | fixed
        try:
            self.signature.bind(**values)
        except TypeError as error:
            names = ", ".join(self.signature.parameters) or "none"
            raise RefusedCallError(f"{self.name}: {error} (its arguments: {names})") from None
        for name in given:
            if name in self.adapters and name not in fixed:
                values[name] = self._converted(name, given[name])
        return values

    def _converted(self, name, value):
        """Returns an argument of the model as its type hint. Raises RefusedCallError.

        Some formats of calls know only texts, so the text "[1, 2]" serves as a list."""
        texts = [json.dumps(value)]
        if isinstance(value, str):
            texts.append(value)
        problems = []
        for text in texts:
            try:
                return self.adapters[name].validate_json(text)
            except ValidationError as error:
                problems += error.errors(include_url=False)
        where = ".".join(map(str, [name, *problems[0]["loc"]]))
        raise RefusedCallError(f"{self.name}: {where}: {problems[0]['msg']}")


def tool_text(value) -> str:
    """Returns what the model reads of a value that a tool returned.

    A str stays as it is, None is "", and anything else becomes JSON, or in it the `str`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def join_contents(contents, separator):
    """Returns the contents of several messages as one: a text, or a list of parts if one is."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(contents)
    parts = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def shorten(text: str, limit: int, side: str, tokenizer) -> str:
    """Cuts a long text to `limit` tokens, with "..." for the rest.

    side: what is kept, as in verl: "left" is the start, "right" the end, "middle" both."""
    text = clean(text)
    if len(text.encode()) <= limit:  # a token has at least one byte
        return text
    # Tokenising a huge text is slow, so its middle is cut out first.
    n_kept = 64 * limit  # characters at either end
    if len(text) > 2 * n_kept:
        text = f"{text[:n_kept]}...{text[-n_kept:]}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= limit:
        return text
    n_head = {"left": limit, "middle": (limit + 1) // 2, "right": 0}[side]
    n_tail = limit - n_head
    head = tokenizer.decode(ids[:n_head])
    tail = tokenizer.decode(ids[len(ids) - n_tail :])
    return f"{head}...{tail}"


# ---------------------------------------------------------------- probe calls


def _schema(name, **types):
    """Returns the schema of a made-up tool. types: those of its arguments."""
    properties = {key: {"type": kind, "description": key} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


NAME = "probe_look"
SCHEMAS = [
    _schema(NAME, q="string", n="integer", on="boolean", x="number", o="object"),
    _schema("probe_now"),
]
CALL = (NAME, {"q": "Zq1"})
ALONE = "a call"
EMPTY = "a call without arguments"
BESIDE = "a text beside a call"
TYPES = "arguments of all types"
TWO = "two calls in a turn"
# A turn of the assistant: the text before its calls, and the calls.
PROBES = {
    ALONE: ("", [CALL]),
    "a number": ("", [(NAME, {"n": 3})]),
    TYPES: ("", [(NAME, {"q": 'ü\n"1" Zq1', "on": True, "x": 0.5, "o": {"a": [1, None]}})]),
    EMPTY: ("", [("probe_now", {})]),
    TWO: ("", [CALL, (NAME, {"q": "Zq2", "n": 2})]),
    BESIDE: ("Beside.", [CALL]),
}
# Of parsers that read equally many probes, the first is taken. Those in LAST read other models'
# formats as well.
FIRST = ["hermes", "qwen3_coder"]
LAST = ["hunyuan_a13b", "llama3_json", "llama4_json"]
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]{3,}\]")
# A call without "arguments", such as {"name": "now"}, which most parsers reject.
WITHOUT_ARGUMENTS = re.compile(r'(\{\s*"name"\s*:\s*"[^"\\]*"\s*)\}')
MALFORMED = "the tool call is not complete and well-formed"


class CallFormat:
    """How a model writes tool calls. Its chat template writes probe calls; a parser reads them.

    tokenizer: with the variables of the template. name: a parser of `vllm serve
    --tool-call-parser`, "template" (`TemplateParser`), or "auto": the first of all parsers that
    reads most probes. If the template writes no calls, "auto" means hermes, with a warning.
    Afterwards `name` is that of the parser, and `lost` lists the probes that it does not read.

    Raises BadInput if there is no such parser, if it does not fit the tokenizer, and if "auto"
    finds none that reads the template's calls."""

    def __init__(self, tokenizer, name: str = "auto"):
        # Each parser asks for the vocabulary, which takes 0.1 s.
        vocabulary = tokenizer.get_vocab()
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.get_vocab = lambda: vocabulary
        self.template = chat_template(tokenizer)
        forms = [*self._forms()]
        if name == "auto" and not forms:
            name = "hermes"
            warnings.warn(
                "the chat template writes no tool calls, so the prompt has to describe them, in "
                "the format of --tool_parser hermes",
                stacklevel=2,
            )
        self.name = name
        self.parser = None
        self.turns = {}  # name of a probe -> the turn as the template writes it
        self.id_start = None  # what precedes the id of a call, if the template writes ids
        read = self._choose(forms or [({}, None)])
        self.lost = [probe for probe in self.turns if probe not in read]
        # A call that the parser does not read is malformed if it has the opening of a call. One
        # that it does read is, if it lacks the closing tag, and the parser would complete it.
        if read:
            self.opening = self.opening_of(self.turns)
        else:
            tag = getattr(self.parser, "tool_call_start_token", None)
            self.opening = lambda names: re.compile(re.escape(tag) if tag else "(?!)")
        self.closing = None
        # Some templates write the text beside a call behind it.
        ends = [turn[::-1] for probe, turn in self.turns.items() if probe != BESIDE]
        tags = TAG.findall(commonprefix(ends)[::-1])
        if tags and any(self._completes(probe) for probe in (ALONE, TYPES) if probe in read):
            self.closing = tags[-1]

    def _choose(self, forms):
        """Sets parser and name, turns and id_start. Returns the probes that the parser reads."""
        from vllm.tool_parsers import ToolParserManager  # takes seconds; --help need not wait

        registered = ToolParserManager.list_registered()
        asked = self.name
        names = [asked]
        if asked == "auto":
            others = [name for name in registered if name not in FIRST + LAST]
            names = [*FIRST, *others, *LAST, "template"]
        problem = "none reads what the chat template writes"
        read = []
        for turns, id_start in forms:
            for name in names:
                try:
                    parser = self._parser(name, turns)
                except Exception as error:  # most refuse a tokenizer without their tokens
                    problem = error if name == asked else problem
                    continue
                found = [probe for probe in turns if _reads(parser, turns[probe], probe)]
                is_better = len(found) > len(read) and found != [EMPTY]
                if is_better or (name == asked and not self.parser):
                    read = found
                    self.name = name
                    self.parser = parser
                    self.turns = turns
                    self.id_start = id_start
                if len(read) == len(turns):
                    break
            if ALONE in read:
                break
        if not self.parser:
            known = ", ".join(["auto", "template", *registered])
            raise BadInput(
                f"--tool_parser {asked} can't read this model's calls ({problem!r:.200}): choose "
                f"from {known}"
            )
        return read

    def _parser(self, name, turns):
        """Returns the parser of this name. Raises whatever it raises if it does not fit."""
        if name == "template":
            return TemplateParser(turns, self.opening_of(turns))
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)(self.tokenizer)
        # The model reads what is wrong with a call. vLLM resets levels when its engine starts.
        for module in [*logging.root.manager.loggerDict]:
            if module.startswith(("vllm.tool_parsers", "vllm.parser")):
                logging.getLogger(module).disabled = True
        parser.extract_tool_calls("", _request("[]"))  # some need vLLM's own server
        return parser

    def _forms(self) -> Iterator[tuple]:
        """Yields the probes as the template writes them, and what precedes the id of a call.

        Some templates want arguments as JSON texts. Kimi's writes an id in place of a name."""
        nine_digits = "00000100{number}"
        kimi = "functions.{name}:{number}"
        for form, id_form in ((dict, nine_digits), (json.dumps, nine_digits), (dict, kimi)):
            turns = {}
            for probe, (content, calls) in PROBES.items():
                made = []
                for number, (name, arguments) in enumerate(calls):
                    made_id = id_form.format(name=name, number=number)
                    made.append(function_call(made_id, name, form(arguments)))
                with suppress(Exception):  # templates raise whatever they like
                    turns[probe] = self._turn(content, made)
            if ALONE in turns:
                before, found, _ = turns[ALONE].partition(id_form.format(name=NAME, number=0))
                yield turns, before[-8:] if found else None

    def _turn(self, content, calls):
        """Returns a turn with calls as the model samples it. Raises ValueError if one is hidden."""
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        _, written = self.template.read(self.template.written(turn, SCHEMAS), opened=False)
        said = [call["function"]["name"] for call in calls] + re.findall(r"Zq\d", str(calls))
        if not all(word in written for word in said):
            raise ValueError("the template hides a call")
        return written.lstrip()

    def _completes(self, probe):
        """Returns whether the parser reads a call that was cut, with other arguments."""
        turn = self.turns[probe]
        _, (called,) = read_calls(self.parser, turn, SCHEMAS)
        for end in range(turn.index(NAME), len(turn)):
            _, calls = read_calls(self.parser, turn[:end], SCHEMAS)
            if calls and calls[0]["arguments"] != called["arguments"]:
                return True
        return False

    def opening_of(self, turns: dict[str, str]) -> Callable:
        """Returns a function: the tools' names -> a regular expression for the start of a call.

        That is the first tag that only calls have or, in a format without tags, what stands before
        and after a tool's name."""
        texts = [text.partition("probe_")[0] for probe, text in turns.items() if probe != BESIDE]
        opening = commonprefix(texts)
        others = {self.template.think_start, self.template.think_end}
        others |= {self.tokenizer.decode([stop]) for stop in self.template.stops}
        tags = [tag for tag in TAG.findall(opening) if tag not in others]
        if tags:
            return lambda names: re.compile(re.escape(tags[0]))
        after = turns[ALONE].partition(NAME)[2].lstrip()[:1]

        def pattern(names):
            any_name = "|".join(map(re.escape, names)) or "(?!)"
            return re.compile(rf"{_loose(opening)}\s*(?:{any_name})\s*{re.escape(after)}")

        return pattern

    def parse(self, text: str, schemas: list[dict]) -> tuple[str, list[dict]]:
        """Returns (the text outside of calls, the calls): see `parse_tool_calls`."""
        names = [schema.get("function", {}).get("name", "") for schema in schemas]
        starts = [match.start() for match in self.opening(names).finditer(text)]
        malformed = {"name": "", "arguments": {}, "error": MALFORMED}
        if starts and self.closing and self.closing not in text[starts[-1] :]:
            content, calls = self.parse(text[: starts[-1]], schemas)  # before the one that was cut
            return content, [*calls, malformed]
        content, calls = read_calls(self.parser, text, schemas)
        completed = WITHOUT_ARGUMENTS.sub(r'\1, "arguments": {}}', text)
        if not calls and completed != text:
            content, calls = read_calls(self.parser, completed, schemas)
        if calls is None or (starts and not calls):
            return text, [malformed]
        if self.template.channel:  # it begins the message with the call (gpt-oss)
            content = content.partition(self.template.channel)[0]
        ids = []
        if self.id_start:
            ids = re.findall(re.escape(self.id_start) + r"([\w.:-]+)", text)
        if len(ids) == len(calls):
            for call, given in zip(calls, ids):
                call["id"] = given
        return content, calls

    def check(self, schemas: list[dict]) -> Iterator[str]:
        """Tries the names of tools. Yields warnings. Raises BadInput if calls are not read."""
        problem = ""
        if self.turns and len(self.lost) == len(self.turns):
            problem = f"the calls that the chat template writes: {self.turns[ALONE]!r:.200}"
        elif self.lost:
            yield f"--tool_parser {self.name} does not read {', '.join(self.lost)}"
        tried = schemas if ALONE in {*self.turns} - {*self.lost} else []
        for schema in tried:
            name = schema["function"]["name"]
            renamed = SCHEMAS[0]["function"] | {"name": name}
            turn = self.turns[ALONE].replace(NAME, name)
            _, calls = read_calls(self.parser, turn, [{"type": "function", "function": renamed}])
            if not calls or (calls[0]["name"], calls[0]["arguments"]) != (name, CALL[1]):
                problem = f"calls of the tool {name!r}: rename it"
        if problem:
            raise BadInput(f"--tool_parser {self.name} does not read {problem}")


def _loose(text):
    """Returns a pattern for a text, with any white space, or none, where the text has some."""
    return r"\s*".join(map(re.escape, text.split()))


def _reads(parser, turn, probe):
    """Returns whether a parser gives a probe back, with its types and the text around it."""
    content, calls = read_calls(parser, turn, SCHEMAS)
    said, made = PROBES[probe]
    read = [(call["name"], call["arguments"]) for call in calls or ()]
    # As JSON, where True is not 1.
    same = json.dumps(read, sort_keys=True) == json.dumps(made, sort_keys=True)
    return same and content.strip() in ("", said)


class TemplateParser:
    """Reads calls whose arguments are JSON as the template writes them, like a parser of vLLM's.

    A call is what precedes a name in the probes, the name, anything, and the arguments.

    turns: the probes. opening: as from `CallFormat.opening_of`. Raises ValueError if arguments are
    not JSON."""

    def __init__(self, turns: dict[str, str], opening: Callable):
        if '{"q": "Zq1"}' not in turns[ALONE]:
            raise ValueError("the arguments are not JSON")
        self.opening = opening
        # The second call of a list starts otherwise, and ids differ.
        heads = [turns[probe].rpartition(NAME)[0][::-1] for probe in (ALONE, TWO) if probe in turns]
        head = commonprefix(heads)[::-1].lstrip('", ')
        self.call = re.compile(_loose(head) + r"([\w.-]+)[^{}]{0,80}?(?=\{)")

    def extract_tool_calls(self, text: str, request):
        """Returns what vLLM's parsers return. Raises ValueError for a malformed call."""
        opening = self.opening([tool.function.name for tool in request.tools or ()])
        first = opening.search(text)
        if not first:
            return SimpleNamespace(tools_called=False, tool_calls=[], content=text)
        calls = []
        place = first.start()
        while found := self.call.search(text, place):
            arguments, place = json.JSONDecoder(strict=False).raw_decode(text, found.end())
            function = SimpleNamespace(name=found[1], arguments=json.dumps(arguments))
            calls.append(SimpleNamespace(function=function))
        if not calls or opening.search(text, place):
            raise ValueError("a tool call lacks its name or its arguments")
        content = text[: first.start()]
        return SimpleNamespace(tools_called=True, tool_calls=calls, content=content)


# ---------------------------------------------------------------- reading calls


@functools.cache
def call_format(tokenizer, name: str) -> CallFormat:
    """Returns the tokenizer's CallFormat, which is made once."""
    return CallFormat(tokenizer, name)


def parse_tool_calls(
    text: str, parser_name: str, tokenizer, schemas: list[dict]
) -> tuple[str, list[dict]]:
    """Returns (the text outside of tool calls, [{"name", "arguments", "error"}, ...]).

    arguments is a dict, not yet compared with a schema. error is None, or for the model. A call
    that the parser does not recognise becomes one with the name "" and an error. If the policy gave
    ids, the calls have an "id", too."""
    return call_format(tokenizer, parser_name).parse(text, schemas)


def read_calls(parser, text: str, schemas: list[dict]) -> tuple[str, list[dict] | None]:
    """Returns what a parser reads: as `parse_tool_calls`, but None for calls if it raises."""
    try:
        parsed = parser.extract_tool_calls(text, _request(json.dumps(schemas)))
    except Exception:  # some texts of a model make some parsers raise
        return text, None
    if not parsed.tools_called:
        return text, []
    calls = []
    for each in parsed.tool_calls:
        call = {"name": each.function.name, "arguments": {}, "error": None}
        try:
            arguments = json.loads(each.function.arguments or "{}") or {}
            # JSON may escape half of a character ("\\ud83d"), which no file takes.
            arguments = json.loads(clean(json.dumps(arguments, ensure_ascii=False)))
            if not isinstance(arguments, dict):
                raise ValueError("they must be a JSON object")
            call["arguments"] = arguments
        except (ValueError, RecursionError) as problem:
            call["error"] = f"wrong arguments: {problem}"
        calls.append(call)
    return parsed.content or "", calls


@functools.cache
def _request(schemas):
    """Returns a chat request (cached), because some parsers read the tools' schemas from it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        tools=json.loads(schemas) or None,
    )


def set_tool_calls(message: dict, content: str, calls: list[dict], turn: int):
    """Sets content and tool_calls of an assistant's message, in place.

    content, calls: as from `parse_tool_calls`. turn: the number of the assistant's turn, for
    the ids of calls to which the policy gave none."""
    message["content"] = content
    message["tool_calls"] = []
    for number, tool_call in enumerate(calls):
        tool_call["id"] = tool_call.get("id") or call_id(turn, number)
        made = function_call(tool_call["id"], tool_call["name"], tool_call["arguments"])
        message["tool_calls"].append(made)
