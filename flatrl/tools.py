"""Python functions as tools, what models read of results, and the tool calls in a model's text."""

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from flatrl.bad_input import BadInput
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
            names = self.schema["function"]["parameters"]["properties"]
            hints = get_type_hints(function)
            self.adapters = {name: TypeAdapter(hints[name], config=self.CONFIG) for name in names}
            self.signature = inspect.signature(function)
            self.signature.bind(**dict.fromkeys(names))
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            raise BadInput(
                f"the function {self.name!r} can't be a tool: {reason} (a tool needs type hints, a "
                "Google-style docstring, and arguments that can be passed by name)") from error

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

    A str stays as it is, None is "", and anything else becomes JSON, with `str` of what JSON does
    not know."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------------------------------- tool calls in a turn's text


@functools.cache
def tool_parser(name: str, tokenizer):
    """Returns the parser that `vllm serve --tool-call-parser` selects by this name.

    Raises BadInput if there is none, if the tokenizer lacks the tokens of its format, or if
    it can't parse plain text."""
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", _parser_request("[]"))
    except Exception as error:
        names = ", ".join(sorted(ToolParserManager.list_registered()))
        raise BadInput(
            f"--tool_parser {name} can't read this model's calls ({error!r}): choose from {names}"
        ) from None
    # The model reads what is wrong with its call, so vLLM need not log a traceback.
    logger = logging.getLogger(parser.extract_tool_calls.__module__)
    logger.addFilter(lambda record: False)
    return parser


@functools.cache
def _parser_request(schemas):
    """Returns a chat request for `extract_tool_calls`, because some parsers read tools from it.

    schemas: the tools' schemas, as a JSON list so that requests can be cached."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        tools=json.loads(schemas) or None,
    )


# A tool call without "arguments", such as {"name": "now"}, which most parsers reject.
WITHOUT_ARGUMENTS = re.compile(r'(\{\s*"name"\s*:\s*"[^"\\]*"\s*)\}')
MALFORMED = "the tool call is not valid JSON with name and arguments"


def parse_tool_calls(
    text: str,
    parser_name: str,
    tokenizer,
    schemas: list[dict],
) -> tuple:
    """Returns (the text outside of tool calls, [{"name", "arguments", "error"}, ...]).

    arguments is a dict. error is None, or tells the model why the call can't be executed. A
    call that the parser does not recognise becomes one with the name "" and an error."""
    parser = tool_parser(parser_name, tokenizer)
    malformed = {"name": "", "arguments": {}, "error": MALFORMED}
    completed = WITHOUT_ARGUMENTS.sub(r'\1, "arguments": {}}', text)
    try:
        request = _parser_request(json.dumps(schemas))
        parsed = parser.extract_tool_calls(text, request)
        if not parsed.tools_called and completed != text:
            parsed = parser.extract_tool_calls(completed, request)
    except Exception:  # some texts make some parsers raise, and a client may send any schema
        return text, [malformed]
    if parsed.tools_called:
        return parsed.content or "", [_read_call(each.function) for each in parsed.tool_calls]
    # A start token shows that the model tried to call a tool. Not all parsers have one.
    start = getattr(parser, "tool_call_start_token", None)
    return text, [malformed] if start and start in text else []


def _read_call(function):
    """Returns a parsed call with its arguments as a dict. Those that are missing or null are {}."""
    arguments = {}
    error = None
    try:
        arguments = json.loads(function.arguments or "{}") or {}
        # JSON may escape half of a character ("\\ud83d"), which no file takes.
        arguments = json.loads(clean(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError) as problem:
        error = f"wrong arguments: {problem}"
    if not isinstance(arguments, dict):
        arguments = {}
        error = "wrong arguments: they must be a JSON object"
    return {"name": function.name, "arguments": arguments, "error": error}


def set_tool_calls(message: dict, content: str, calls: list[dict], turn: int):
    """Sets content and tool_calls of an assistant's message, in place.

    content, calls: as from `parse_tool_calls`. turn: the number of the assistant's turn, for
    the ids of the calls."""
    message["content"] = content
    message["tool_calls"] = [
        function_call(call_id(turn, number), tool_call["name"], tool_call["arguments"])
        for number, tool_call in enumerate(calls)
    ]


def call_id(turn: int, number: int) -> str:
    """Returns the id of a tool call: nine characters, as Mistral's template requires.

    turn: the number of the assistant's turn. number: that of the call within the turn."""
    return f"{turn:06d}{number:03d}"


def function_call(call_id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}
