"""Python functions as tools, what models read of results, and the tool calls in a model's text."""

import copy
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from os.path import commonprefix
from types import SimpleNamespace
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from flatrl.bad_input import BadInput, need
from flatrl.chat_template import call_id, chat_template, function_call
from flatrl.texts import clean

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
            for name, entry in properties.items():
                adapter = TypeAdapter(hints[name], config=self.CONFIG)
                self.adapters[name] = adapter
                if entry.get("type") == "object":  # also what transformers does not know: enums
                    entry.update(adapter.json_schema())
                if not {"type", "enum"} & entry.keys():
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

    A str stays as it is, None is "", and anything else is JSON, with str() of what JSON lacks."""
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


# ---------------------------------------------------------------- probe calls


def _schema(name, **types):
    """Returns the schema of a made-up tool. types: those of its arguments."""
    properties = {key: {"type": kind, "description": key} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


NAME = "probe_look"
PROBE_IDS = ("000001000", r"functions\.probe_look:0")  # patterns, the second for Kimi's ids
SCHEMAS = [
    _schema(NAME, q="string", n="integer", on="boolean", x="number", o="object"),
    _schema("probe_now"),
]
CALL = (NAME, {"q": "Zq1"})
ALL_TYPES = {"q": 'ü\n"1" Zq1', "on": True, "x": 0.5, "o": {"a": [1, None]}}
ALONE = "a call"
EMPTY = "a call without arguments"
BESIDE = "a text beside a call"
TWO = "two calls in a turn"
# A turn of the assistant: the text before its calls, and the calls.
PROBES = {
    ALONE: ("", [CALL]),
    "a number": ("", [(NAME, {"n": 3})]),
    "arguments of all types": ("", [(NAME, ALL_TYPES)]),
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


class CallFormat:
    """How a model writes tool calls. Its chat template writes probe calls; a parser reads them.

    tokenizer: with the variables of the template. name: a parser of vLLM's, "template"
    (`TemplateParser`), or "auto": the first of all parsers that reads most probes; hermes if the
    template writes no calls. Afterwards `name` is that of the parser, and `lost` lists the probes
    that it does not read. Raises BadInput if the parser does not fit, and if "auto" finds none."""

    def __init__(self, tokenizer, name: str = "auto"):
        # Each parser asks for the vocabulary, which takes 0.1 s.
        vocabulary = tokenizer.get_vocab()
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.get_vocab = lambda: vocabulary
        self.template = chat_template(tokenizer)
        forms = [*self._forms()]
        if name == "auto" and not forms:
            name = "hermes"
        self.name, self.parser, self.turns, read = self._choose(name, forms or [{}])
        self.lost = [probe for probe in self.turns if probe not in read]
        # What begins a call and, if the parser would complete one that was cut, what must end it:
        # glm45 reads "<tool_call>look<arg_key>q" as look().
        self.closing = None
        if read:
            self.opening = _opening(self.turns)
            self.closing = self._closing() if ALONE in read else None
        else:
            tag = getattr(self.parser, "tool_call_start_token", None)
            self.opening = re.escape(tag) if tag else "(?!)"
        # What the ids of calls look like, if the template writes any.
        before, *has_id = re.split("|".join(PROBE_IDS), self.turns.get(ALONE, ""))
        self.id = re.compile(re.escape(before[-8:]) + r"([\w.:-]+)" if has_id else "(?!)")

    def _forms(self) -> Iterator[dict[str, str]]:
        """Yields the probes as the template writes them, for each form of calls that it takes.

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
                yield turns

    def _turn(self, content, calls):
        """Returns a turn with calls as the model samples it. Raises ValueError if one is hidden."""
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        _, written = self.template.read(self.template.turn_text(turn, SCHEMAS), opened=False)
        if not all(word in written for word in re.findall(r"probe_\w+|Zq\d", str(calls))):
            raise ValueError("the template hides a call")
        return written.lstrip()

    def _choose(self, asked, forms):
        """Returns the name, the parser, the probes, and those that the parser reads: the most."""
        from vllm.tool_parsers import ToolParserManager  # takes seconds; --help need not wait

        known = ToolParserManager.list_registered()
        names = [asked]
        if asked == "auto":
            others = [name for name in known if name not in FIRST + LAST]
            names = [*FIRST, *others, *LAST, "template"]
        best = None
        for turns in forms:
            for name, parser in self._parsers(names, turns):
                read = [probe for probe in turns if _reads(parser, turns[probe], probe)]
                if read == [EMPTY]:  # a parser of another format may read it by chance
                    read = []
                if not best or len(read) > len(best[-1]):
                    best = name, parser, turns, read
                if len(read) == len(turns):
                    return best
            if best and ALONE in best[-1]:
                return best
        need(
            best and (best[-1] or asked != "auto"),
            f"--tool_parser {asked} does not fit the model's tokenizer and chat template: "
            f"choose from {', '.join(['auto', 'template', *known])}",
        )
        return best

    def _parsers(self, names, turns):
        """Yields (name, parser) for each parser that fits the tokenizer and the probes."""
        from vllm.tool_parsers import ToolParserManager

        for name in names:
            with suppress(Exception):  # most refuse a tokenizer without their tokens
                if name == "template":
                    yield name, TemplateParser(turns)
                    continue
                parser = ToolParserManager.get_tool_parser(name)(self.tokenizer)
                # The model reads what is wrong. vLLM resets levels when its engine starts.
                for module in [*logging.root.manager.loggerDict]:
                    if module.startswith(("vllm.tool_parsers", "vllm.parser")):
                        logging.getLogger(module).disabled = True
                yield name, parser

    def _closing(self):
        """Returns the tag that ends every call, if the parser reads one that was cut; else None."""
        # Some templates write the text beside a call behind it.
        ends = [turn[::-1] for probe, turn in self.turns.items() if probe != BESIDE]
        tags = TAG.findall(commonprefix(ends)[::-1])
        turn = self.turns[ALONE]
        for end in range(turn.index(NAME), len(turn)):
            _, calls = read_calls(self.parser, turn[:end], SCHEMAS)
            if tags and calls and calls[0]["arguments"] != CALL[1]:
                return tags[-1]
        return None

    def parse(self, text: str, schemas: list[dict]) -> tuple[str, list[dict]]:
        """Returns (the text outside of calls, the calls): see `parse_tool_calls`."""
        starts = _starts(self.opening, schemas, text)
        problem = "the tool call is not complete and well-formed"
        malformed = {"name": "", "arguments": {}, "error": problem}
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
        ids = self.id.findall(text)
        if len(ids) == len(calls):
            for call, given in zip(calls, ids):
                call["id"] = given
        return content, calls

    def check(self, schemas: list[dict]) -> Iterator[str]:
        """Tries the names of tools. Yields warnings. Raises BadInput if calls are not read."""
        if not self.turns:
            yield f"the template writes no calls: describe those of {self.name} in the prompt"
        if self.lost:
            yield f"--tool_parser {self.name} does not read {', '.join(self.lost)}"
        reads_nothing = len(self.lost) == len(self.turns)  # so it is tried, and refused
        for schema in schemas if self.turns and (reads_nothing or ALONE not in self.lost) else ():
            name = schema["function"]["name"]
            turn = self.turns[ALONE].replace(NAME, name)
            _, calls = read_calls(self.parser, turn, [_schema(name, q="string")])
            need(
                calls and (calls[0]["name"], calls[0]["arguments"]) == (name, CALL[1]),
                f"--tool_parser {self.name} does not read a call of the tool {name!r}, which the "
                f"chat template writes as {turn!r:.200}: rename it, or name another parser",
            )


def _opening(turns):
    """Returns a pattern for the start of a call, in which NAMES stands for any tool's name: the
    first tag of all probes or, without tags, what stands before and after a tool's name."""
    texts = [text.partition("probe_")[0] for probe, text in turns.items() if probe != BESIDE]
    opening = commonprefix(texts)
    tags = TAG.findall(opening)
    if tags:
        return re.escape(tags[0])
    after = turns[ALONE].partition(NAME)[2].lstrip()[:1]
    return rf"{_loose(opening)}\s*NAMES\s*{re.escape(after)}"


def _starts(opening, schemas, text):
    """Returns the places in a text where calls start. opening: as from `_opening`."""
    names = [re.escape(schema.get("function", {}).get("name", "")) for schema in schemas]
    pattern = opening.replace("NAMES", f"(?:{'|'.join(names) or '(?!)'})")
    return [match.start() for match in re.finditer(pattern, text)]


def _loose(text):
    """Returns a pattern for a text, with any white space, or none, where the text has some."""
    return r"\s*".join(map(re.escape, text.split()))


def _reads(parser, turn, probe):
    """Returns whether a parser gives a probe back with its types, and no other text around it."""
    content, calls = read_calls(parser, turn, SCHEMAS)
    said, made = PROBES[probe]
    read = [(call["name"], call["arguments"]) for call in calls or ()]
    # As JSON, where True is not 1.
    same = json.dumps(read, sort_keys=True) == json.dumps(made, sort_keys=True)
    return same and content.strip() in ("", said)


class TemplateParser:
    """Reads calls whose arguments are JSON as the template writes them, like a parser of vLLM's.

    A call is what precedes a name in the probes, the name, anything, and the arguments. Raises
    ValueError if these are not JSON in the probes, `turns`."""

    def __init__(self, turns: dict[str, str]):
        if '{"q": "Zq1"}' not in turns[ALONE]:
            raise ValueError("the arguments are not JSON")
        self.opening = _opening(turns)
        # The second call of a list starts otherwise, and ids differ.
        heads = [turns[probe].rpartition(NAME)[0][::-1] for probe in (ALONE, TWO) if probe in turns]
        head = commonprefix(heads)[::-1].lstrip('", ')
        self.call = re.compile(_loose(head) + r"([\w.-]+)[^{}]{0,80}?(?=\{)")

    def extract_tool_calls(self, text: str, request):
        """Returns what vLLM's parsers return. Raises ValueError for a malformed call."""
        schemas = [tool.model_dump() for tool in request.tools or ()]
        starts = _starts(self.opening, schemas, text)
        calls = []
        place = starts[0] if starts else len(text)
        content = text[:place]
        while found := self.call.search(text, place):
            arguments, place = json.JSONDecoder(strict=False).raw_decode(text, found.end())
            function = SimpleNamespace(name=found[1], arguments=json.dumps(arguments))
            calls.append(SimpleNamespace(function=function))
        if starts and (not calls or starts[-1] >= place):
            raise ValueError("a tool call lacks its name or its arguments")
        return SimpleNamespace(tools_called=bool(calls), tool_calls=calls, content=content)


# ---------------------------------------------------------------- reading calls

call_format = functools.cache(CallFormat)


def parse_tool_calls(
    text: str, parser_name: str, tokenizer, schemas: list[dict]
) -> tuple[str, list[dict]]:
    """Returns (the text outside of tool calls, [{"name", "arguments", "error"}, ...]).

    arguments is a dict, not yet compared with a schema. error is None, or for the model: a call
    that the parser does not recognise has the name "". Calls have an "id" if the policy gave it."""
    return call_format(tokenizer, parser_name).parse(text, schemas)


def read_calls(parser, text: str, schemas: list[dict]) -> tuple[str, list[dict] | None]:
    """Returns what a parser reads: as `parse_tool_calls`, but None for calls if it raises."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    # Some parsers read the tools' schemas from a request.
    request = ChatCompletionRequest(messages=[], tools=schemas or None)
    try:
        parsed = parser.extract_tool_calls(text, request)
    except Exception:  # some texts of a model make some parsers raise
        return text, None
    if not parsed.tools_called:
        return text, []
    calls = []
    for each in parsed.tool_calls:
        call = {"name": each.function.name, "arguments": {}, "error": None}
        try:
            arguments = json.loads(each.function.arguments or "{}")
            arguments = {} if arguments in (None, "") else arguments
            # JSON may escape half of a character ("\\ud83d"), which no file takes.
            arguments = json.loads(clean(json.dumps(arguments, ensure_ascii=False)))
            if not isinstance(arguments, dict):
                raise ValueError("they must be a JSON object")
            call["arguments"] = arguments
        except (ValueError, RecursionError) as problem:
            call["error"] = f"wrong arguments: {problem}"
        calls.append(call)
    return parsed.content or "", calls
