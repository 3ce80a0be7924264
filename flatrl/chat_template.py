"""What a model's chat template does: a chat as ids, and what new messages add to it.

The template is used on chats of the run, and before it on made-up ones. Each text that the
assistant said, or that a made-up chat says, is replaced by a word of its own. So a word that is
missing was left out, and what follows the last word ends the turn. `ChatTemplate.suffix` is what
happens between two turns: the caller appends its ids to the prompt and the sampled ids, which are
never encoded again."""

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from os.path import commonprefix

from flatrl.bad_input import BadInput
from flatrl.user_code import TOKEN_BREAK, clean


class RewritesHistory(ValueError):
    """New messages make the template change earlier ones, so a new sequence must begin."""


# ---------------------------------------------------------------- texts and control tokens


class Texts:
    """Turns texts into ids so that no text from outside becomes a control token.

    Control tokens are the special tokens, and added tokens such as <tool_call> that begin with
    punctuation, have a letter and no space. `special` and `controls` are {id: token}."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = {}
        self.controls = {}
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special[number] = token.content
            if token.special or re.fullmatch(r"[^\w\s]\S*\w\S*", token.content):
                self.controls[number] = token.content
        self.special_starts = _start_of_any(self.special.values())
        self.control_starts = _start_of_any(self.controls.values())

    def plain(self, value, role: str = "user"):
        """Returns a message or a list of tools in which no text becomes a control token.

        A tool that says "so<|im_end|>" must not end its message. So a break is put wherever a
        control token begins. Messages of the assistant and the system keep their markup: the
        policy samples it, and system prompts show it in examples."""
        is_ours = role in ("assistant", "system")
        starts = self.special_starts if is_ours else self.control_starts
        return _edited(value, lambda text: starts.sub(TOKEN_BREAK, clean(text)))

    def ids(self, text: str, begins: bool = True) -> list[int]:
        """Returns the ids of a text. No token spans a break, or is a control token after one.

        begins: whether the text begins a sequence. If not, the tokenizer puts no space before it.
        No special tokens are added, because the template writes them all, BOS included."""
        # Some templates write arguments and tools as Python or JSON does, with the break escaped.
        first, *pieces = text.replace("\\ufdd0", TOKEN_BREAK).split(TOKEN_BREAK)
        ids = self._encoded(first, begins)
        for piece in pieces:
            # The first character alone, so that no control token begins with it. If the character
            # is a control token itself, it is dropped.
            first = self._encoded(piece[:1], False)
            ids += [number for number in first if number not in self.controls]
            ids += self._encoded(piece[1:], False)
        return ids

    def _encoded(self, text, begins):
        # After the EOS token, one id, so that no space is put before the first word.
        start = "" if begins else self.tokenizer.eos_token or ""
        ids = self.tokenizer.encode(start + text, add_special_tokens=False)
        return ids[1:] if start else ids

    def special_ids(self, text: str) -> list[int]:
        """Returns the ids of the special tokens in a text."""
        return self.tokenizer.convert_tokens_to_ids(self.special_starts.findall(text))


def _start_of_any(texts):
    """Returns a regular expression for each place where one of the texts begins (group 1).

    It looks ahead, because tokens may overlap: "[e~[e~[" has two that begin "[e~["."""
    longest_first = sorted(texts, key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)()")  # matches nowhere
    firsts = re.escape("".join({text[0] for text in longest_first}))  # faster
    any_text = "|".join(map(re.escape, longest_first))
    return re.compile(f"(?=[{firsts}])(?=({any_text}))")


def _edited(value, edit):
    """Returns nested lists and dicts with edit(text) in place of each text and each key."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, list):
        return [_edited(inner, edit) for inner in value]
    if isinstance(value, dict):
        return {edit(key): _edited(inner, edit) for key, inner in value.items()}
    return value


# ---------------------------------------------------------------- chats of words

MARK = "Probe"  # begins each word
WORD = re.compile(MARK + r"\d{7}")


def _in_words(messages, role=None):
    """Returns messages with a word of its own in place of each text, such as "Probe0001000".

    It begins with MARK and the number of the message. role: whose texts are replaced, by default
    everyone's."""
    changed = []
    for number, message in enumerate(messages):
        message = dict(message)
        changed.append(message)
        if role not in (None, message["role"]):
            continue
        words = (f"{MARK}{number:04d}{i:03d}" for i in count())
        for key in ("reasoning_content", "content"):
            said = message.get(key)
            if isinstance(said, list):
                parts = [p | {"text": next(words)} if p.get("text") else p for p in said]
                message[key] = parts
            elif said and said.strip():
                message[key] = next(words)
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"] | {"arguments": {"text": next(words)}}
            calls.append(call | {"function": function})
        if calls:
            message["tool_calls"] = calls
    return changed


def _split(text, words):
    """Returns a text up to the last of the words in it, and the rest.

    Raises RewritesHistory unless all words are in the text."""
    places = [text.rfind(word) for word in words]
    if -1 in places:
        raise RewritesHistory("the chat template leaves out what the assistant said")
    end = max(places) + len(words[0])  # all have the same length
    return text[:end], text[end:]


def _recent(messages):
    """Returns the part of a chat that a suffix depends on: it stays short.

    A round is a turn of the assistant and the messages that answer it. The part is what precedes
    the first turn, the last earlier round of each kind, and the latest round. So a template can
    look back at the last turn with a thought, for example."""
    rounds = [[]]  # the first one precedes the assistant's first turn
    for message in messages:
        if message["role"] == "assistant":
            rounds.append([])
        rounds[-1].append(message)
    first, *earlier, latest = rounds
    last_of_kind = {}
    for each in reversed(earlier):
        last_of_kind.setdefault(_kind(each), each)
    return [*first, *chain(*reversed(last_of_kind.values())), *latest]


def _kind(messages):
    """Returns what a template can tell from messages without reading their words."""
    kind = []
    for message in messages:
        n_calls = len(message.get("tool_calls") or ())
        has_thought = bool(message.get("reasoning_content"))
        kind += [message["role"], bool(message.get("content")), has_thought, n_calls]
    return tuple(kind)


def call_id(turn: int, number: int) -> str:
    """Returns the id of a tool call: nine characters, as Mistral's template requires.

    turn: the number of the assistant's turn. number: that of the call within the turn."""
    return f"{turn:06d}{number:03d}"


def function_call(call_id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def _called(turn, n_calls=1, **said):
    """Returns a turn with calls, and the messages with their results."""
    ids = [call_id(turn, number) for number in range(n_calls)]
    calls = [function_call(made_id, "probe", {"text": "?"}) for made_id in ids]
    result = {"role": "tool", "name": "probe", "content": "?"}
    results = [result | {"tool_call_id": made_id} for made_id in ids]
    return [{"role": "assistant", "content": "", **said, "tool_calls": calls}, *results]


USER = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "?"}
THOUGHT = ANSWER | {"reasoning_content": "?"}
CALL, RESULT = _called(1)
CALL_AFTER_THOUGHT = CALL | {"reasoning_content": "?"}
TOLD = "a tool's answer"
IN_TEXT = "an answer to a call in the text"
TWO_CALLS = "two calls in a turn"
REPLY = "a user's answer"
# A round is a turn of the assistant with what answers it. Each is a function of its number.
ROUNDS = {
    REPLY: lambda n: [ANSWER, USER],
    "reasoning": lambda n: [THOUGHT, USER],
    TOLD: _called,
    "reasoning before a call": functools.partial(_called, reasoning_content="?"),
    "text before a call": functools.partial(_called, content="?"),
    TWO_CALLS: functools.partial(_called, n_calls=2),
    IN_TEXT: lambda n: [ANSWER, *_called(n)[1:]],
}

# ---------------------------------------------------------------- the template

THINK_TAGS = "<think> </think>"
PROMPT_TAIL = 64  # tokens at the end of a prompt, in which it may open a thought


class ChatTemplate:
    """What a model's chat template does. `suffix` is what happens between two turns.

    tokenizer: with the variables of the template. think_tags: the tags around reasoning.
    stops: the ids that end a turn; the attribute has those of the template, too.
    answer_end, call_end: the ids with which it ends an answer and a turn with calls.
    shows_calls: whether it writes tool_calls. If not, calls stay in the text. Raises BadInput if
    the tokenizer has no chat template."""

    def __init__(self, tokenizer, stops: Iterable[int] = (), think_tags: str = THINK_TAGS):
        if not tokenizer.chat_template:
            raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
        self.tokenizer = tokenizer
        self.texts = Texts(tokenizer)
        self.think_start, self.think_end = think_tags.split()
        start, end = map(re.escape, think_tags.split())
        self.empty_thought = re.compile(rf"{start}\s*{end}\s*")
        self._cached_ids = functools.lru_cache(maxsize=64)(self.texts.ids)
        # `text` reads these two, and writes the made-up chats below.
        self.no_tools = None
        self.hides_thought = {}  # {whether a turn has calls: why its thought is not written}
        if self.problem([USER]):  # Hermes-2-Pro's needs tools: an empty list will do
            self.no_tools = []
        turns = {False: THOUGHT, True: CALL_AFTER_THOUGHT}
        self.hides_thought = {key: self.problem([USER, turn]) for key, turn in turns.items()}
        self.shows_calls = not self.problem([USER, CALL])
        self.shows_text_beside_calls = not self.problem([USER, CALL | {"content": "?"}])
        self._learn_ends({*stops})
        self._learn_frames()

    # -- a whole chat

    def text(self, messages: list[dict], tools=None, add_generation_prompt=False, **variables):
        """Returns a chat as the template writes it. Raises whatever the template raises.

        Reasoning moves into the content, if the template has no place for it."""
        chat = []
        for message in messages:
            message = dict(message)
            reasoning = message.pop("reasoning_content", None)
            if reasoning is not None and self.hides_thought.get("tool_calls" in message):
                thought = f"{self.think_start}{reasoning}{self.think_end}"
                message["content"] = thought + (message.get("content") or "")
            elif reasoning is not None:  # gpt-oss names it "thinking"
                message |= {"reasoning_content": reasoning, "thinking": reasoning}
            chat.append(message)
        variables |= {"tools": tools or self.no_tools, "tokenize": False}
        variables["add_generation_prompt"] = add_generation_prompt
        return self.tokenizer.apply_chat_template(chat, **variables)

    def render(self, messages: list[dict], tools=None, trusted: Sequence[dict] | None = None):
        """Returns the ids of a chat, with the generation prompt at its end.

        trusted: messages in which the text of a control token becomes that token; by default all.
        An empty chat has no ids: an Interaction must then speak first."""
        if not messages:
            return []
        if trusted is not None:
            plain = self.texts.plain
            messages = [m if m in trusted else plain(m, m["role"]) for m in messages]
        # Rollouts of a group begin with the same prompt.
        return list(self._cached_ids(self.text(messages, self.texts.plain(tools), True)))

    # -- the suffix of a turn

    def suffix(
        self, messages: list[dict], new: list[dict], stop: int | None, tools=None
    ) -> list[int]:
        """Returns the ids that `new` messages (of tools or users) add after an assistant's turn.

        They begin after the stop token with which the policy ended the turn. With Qwen2.5, if it
        sampled "Hi<|im_end|>" and the user says "2?", they are those of

            "\\n<|im_start|>user\\n2?<|im_end|>\\n<|im_start|>assistant\\n"

        stop: the stop token with which the turn ended. Without one (a stop string ended it, or a
            limit), the suffix begins with the template's.

        Raises RewritesHistory if the template now writes the chat in another way: Qwen3 drops
        earlier reasoning, for example. Raises ValueError if it writes nothing for `new`."""
        if messages[-1]["role"] != "assistant":
            raise RewritesHistory("the chat does not end with a turn of the assistant")
        history = messages if self.looks_far_back else _recent(messages)
        added = self._added(history, [self.texts.plain(message) for message in new], stop, tools)
        if not added:
            raise ValueError(f"the chat template writes nothing for {new!r:.80}")
        return self.texts.ids(added, begins=False)

    def _added(self, history, new, stop, tools=None):
        """Returns the text that `new` messages add to a history that ends with a turn.

        The template writes the chat without and with `new`, and with words in place of what the
        assistant said. They show where the turn ends, and whether the template leaves some out:

            head      "...assistant\\nProbe0001000"
            tail      "<|im_end|>\\n"
            new_head  as head, but for empty thoughts; otherwise the history is rewritten
            new_tail  "<|im_end|>\\n<|im_start|>user\\n2?...", of which the stop token is known"""
        *earlier, turn = history
        if not turn.get("tool_calls"):
            turn = turn | {"content": "?"}  # becomes a word, even if the answer is empty
        elif not self.shows_text_beside_calls:
            turn = turn | {"content": ""}  # never written: its word would be missing
        chat = _in_words([*earlier, turn], "assistant")
        words = WORD.findall(str(chat[-1]))
        head, tail = _split(self.text(chat, tools), words)
        new_head, new_tail = _split(self.text([*chat, *new], tools, True), words)
        # Qwen3 writes an empty thought into the last turn alone.
        if self.empty_thought.sub("", head) != self.empty_thought.sub("", new_head):
            raise RewritesHistory("the chat template changes an earlier message")

        stop_text = self.tokenizer.decode([self._end_of(turn) if stop is None else stop])
        # Between the last word and the stop token is the syntax that ends a call or a thought.
        syntax, found, rest = new_tail.partition(stop_text)
        # White space around the syntax is the template's, not the policy's.
        if found and tail.strip().startswith(syntax.strip()):
            return found + rest if stop is None else rest
        # An answer that a stop string or a limit ended, where nothing closes a turn (GLM).
        if stop is None and not turn.get("tool_calls"):
            return new_tail
        raise RewritesHistory("the chat template ends this turn in another way")

    @functools.cached_property
    def looks_far_back(self) -> bool:
        """Whether a suffix depends on more of a chat than `_recent` returns.

        Cohere's template numbers all calls, for example. Made-up chats of many rounds show it."""
        tried = {make: self.problem([USER, *make(1), ANSWER, USER]) for make in ROUNDS.values()}
        kinds = [make for make, problem in tried.items() if not problem.startswith("it raises")]
        for last in kinds:
            rounds = [make(n) for n, make in enumerate([*kinds * 4, last], 1)]
            chat = _in_words([USER, *chain(*rounds)])
            n_new = len(rounds[-1]) - 1  # all but the turn
            history, new = chat[:-n_new], chat[-n_new:]
            whole = self._outcome(history, new)
            if whole and whole != self._outcome(_recent(history), new):
                return True
        return False

    def _outcome(self, history, new, stop=None, tools=None):
        """Returns what new messages add to a made-up chat: a text, RewritesHistory, or None."""
        try:
            return self._added(history, new, stop, tools)
        except RewritesHistory:
            return RewritesHistory
        except Exception:  # templates raise whatever they like
            return None

    def _learn_ends(self, stops):
        """Sets stops, answer_end and call_end.

        A turn ends with a known token, the first special token after its words or, without one,
        that of the next message (GLM). Between two calls are special tokens that end none."""
        after = self._special_after(ANSWER)
        known = [token for token in after if token in stops]
        eos = {self.tokenizer.eos_token_id} - {None}
        self.answer_end = [*known, *after, *self._special_after(ANSWER, USER), *eos, *stops][0]
        two_calls, *_ = _called(1, 2)
        between = self._special_after(two_calls)
        after = self._special_after(CALL) + self._special_after(CALL, RESULT)
        known = [token for token in after if token in stops | {self.answer_end}]
        others = [token for token in after if token not in between]
        self.call_end = [*known, *others, self.answer_end][0]
        self.stops = {*stops, self.answer_end, self.call_end}

    def _special_after(self, *messages):
        """Returns the special tokens after the first word of messages, which follow a user's."""
        chat = [USER, *messages]
        if self.problem(chat):
            return []
        _, _, after, *_ = WORD.split(self.text(_in_words(chat)))  # the user's word comes first
        return self.texts.special_ids(after)

    def _end_of(self, turn):
        """Returns the id of the token that ends a message of the assistant."""
        return self.call_end if turn.get("tool_calls") else self.answer_end

    # -- what the policy said

    def read(self, text: str, opened: bool) -> tuple[str | None, str]:
        """Splits a sampled turn, without its stop token, into (reasoning or None, the rest).

        Reasoning is what think_tags enclose (`split_reasoning`), or what is in the template's own
        channel for it. The rest has tool calls, or is the answer without its frame.

        text: with special tokens. opened: whether the prompt opened the thought."""
        if self.channel:
            thoughts = [thought.strip() for thought in self.channelled.findall(text)]
            reasoning = "\n".join(thoughts) if thoughts else None
            text = self.channelled.sub("", text)
        else:
            reasoning, text = split_reasoning(text, self.think_start, self.think_end, opened)
            if reasoning is not None:  # "\n\n", for example, is between thought and answer
                text = text.removeprefix(self.after_thought.partition(self.think_end)[2])
        if self.before_answer.strip():
            text = text.rpartition(self.before_answer.strip())[2]
        return reasoning, text.removesuffix(self.after_answer)

    def _learn_frames(self):
        """Sets what the template writes around an answer, and after a thought.

        channel: the special token that begins a thought in place of think_tags, or "". channelled:
        a pattern for such a thought, "<|channel|>analysis<|message|>(.*?)<|end|>" in gpt-oss."""
        self.before_answer = self.after_answer = self.after_thought = self.channel = ""
        if self.problem([USER, ANSWER]):
            return
        only_beside_calls = self.hides_thought[False] and not self.hides_thought[True]  # Gemma 4
        thinking = CALL_AFTER_THOUGHT if only_beside_calls else THOUGHT
        thinking, answer = _in_words([thinking, ANSWER])
        written = self.turn_text(answer).partition(answer["content"])
        self.before_answer, _, self.after_answer = written
        before, after, *_ = [*WORD.split(self.turn_text(thinking)), ""]
        begin = self.texts.special_starts.findall(before)
        end = self.texts.special_starts.findall(after)
        if only_beside_calls and end:  # a call follows
            after = after.partition(end[0])[0] + end[0]
        if begin and end and self.think_end not in after:
            self.channel = begin[0]
            after = after.removesuffix(self.before_answer)
            before, behind = re.escape(before.strip()), re.escape(after.strip())
            self.channelled = re.compile(f"{before}(.*?)(?:{behind}|$)", re.DOTALL)
        self.after_thought = after

    @functools.cached_property
    def frame_ids(self) -> set[int]:
        """The special tokens with which the template or the tokenizer frames what is said."""
        roles = self.tokenizer.special_tokens_map.values()  # EOS, padding
        ids = {*self.stops, *self.tokenizer.convert_tokens_to_ids([*roles])}
        for make in ROUNDS.values():
            with suppress(Exception):  # templates raise whatever they like
                ids.update(self.texts.special_ids(self.text([USER, *make(1), ANSWER, USER])))
        return ids

    # -- a given turn

    def turn_ids(self, turn: dict, prompt_ids: Sequence[int] = (), number: int = 1) -> list[int]:
        """Returns the ids of an assistant's turn, including the stop token that ends it.

        It is what the template writes and, if that lacks them (some templates drop reasoning),
        content and thought. If the prompt opens a thought, the turn ends it. Raises ValueError if
        the turn is empty, if the template hides its calls, or if it has a stop token inside.

        prompt_ids: what precedes the turn, by default a user's question. number: that of the turn,
        for the ids of its calls, which their results repeat."""
        turn = {"content": ""} | turn
        calls = turn.get("tool_calls", ())
        if calls:
            turn["tool_calls"] = [c | {"id": call_id(number, i)} for i, c in enumerate(calls)]
        prompt = self.text([USER], add_generation_prompt=True)
        before = self.tokenizer.decode(prompt_ids[-PROMPT_TAIL:]) or prompt
        written = self._completed(self.turn_text(turn), turn, before.rstrip())
        # After the prompt, because some tokenizers put a space before words in other places.
        start = self.texts.ids(prompt)
        ids = self.texts.ids(prompt + written)
        if ids[: len(start)] == start:
            ids = ids[len(start) :]
        else:
            ids = self.texts.ids(written, begins=False)
        shows_calls = all(call["function"]["name"] in written for call in calls)
        has_stop = any(self.tokenizer.decode([each]) in written + str(turn) for each in self.stops)
        if not ids or not shows_calls or has_stop:
            raise ValueError(f"the policy could not say this turn of a demonstration: {turn}")
        return [*ids, self._end_of(turn)]

    def turn_text(self, turn: dict, tools: list[dict] | None = None) -> str:
        """Returns an assistant's turn as the template writes it, without its prompt and its end."""
        prompt = self.text([USER], tools, True)
        written = _after(prompt, self.text([USER, turn], tools))
        header = _after(self.text([USER], tools), prompt)
        if header and written.lstrip().startswith(header.lstrip()):
            written = written.partition(header.lstrip())[2]  # Llama 4 has white space before it
        return written.partition(self.tokenizer.decode([self._end_of(turn)]))[0]

    def _completed(self, written, turn, before):
        """Returns a written turn with what the template left out of it. before: its prompt."""
        opened = before.endswith(self.think_start)  # not so R1's after a tool's answer
        if not turn.get("tool_calls") and turn["content"].strip() not in written:
            written = turn["content"]
        for tag in (self.think_start, self.think_end):
            if before.endswith(tag):
                written = written.removeprefix(tag)
        thought = turn.get("reasoning_content", "")
        if self.think_end in written or (thought.strip() in written and not opened):
            return written
        if opened:
            return f"{thought}{self.think_end}\n\n{written}"
        return f"{self.think_start}{thought}{self.think_end}{written}"

    # -- what the template accepts

    def problem(self, messages: list[dict], tools=None, history: Sequence[dict] = ()) -> str:
        """Returns why the template does not write made-up messages after a history, or ""."""
        chat = _in_words(messages)
        try:
            text = self.text([*history, *chat], tools)
        except Exception as error:  # templates raise whatever they like
            return f"it raises {error!r:.200}"
        for message in chat:
            if not all(word in text for word in WORD.findall(str(message))):
                return f"it leaves out what a message of role {message['role']!r} says"
        return ""

    def accepts(self, name: str) -> bool:
        """Returns whether the template accepts one of the ROUNDS, and a turn after it."""
        return not self.problem([USER, *ROUNDS[name](1), ANSWER, USER])

    def check(self, prompt: list[dict], tools: list[dict], has_user: bool) -> list[str]:
        """Checks a task's chats: a prompt, calls of tools, replies of a simulated user.

        Returns warnings. Raises BadInput if the template does not accept them."""
        self.check_prompt(prompt, tools)
        warnings = []
        if tools:
            messages = ROUNDS[TOLD if self.shows_calls else IN_TEXT](1)
            warnings += self._check_round(TOLD, messages, prompt, tools)
            if self.shows_calls and not self.accepts(TWO_CALLS):
                warnings.append(
                    "takes one call in a turn: give --agent_args '{\"max_parallel_calls\": 1}'"
                )
            if self.text(prompt, tools) == self.text(prompt):
                warnings.append("ignores tools: describe them in the prompt")
        if has_user:
            warnings += self._check_round(REPLY, ROUNDS[REPLY](1), prompt, tools)
        is_fixed = "strftime_now" in getattr(self.tokenizer.apply_chat_template, "keywords", {})
        past = self.text(prompt, tools, strftime_now=datetime(2001, 2, 3).strftime)
        if not is_fixed and past != self.text(prompt, tools):
            warnings.append(
                "writes today's date. So that runs can be repeated, fix it: "
                """--chat_template_args '{"strftime_now": "26 Jul 2024"}'"""
            )
        return [f"the chat template {warning}" for warning in warnings]

    def _check_round(self, name, messages, prompt, tools):
        """Yields warnings about a round. Raises BadInput if it can't follow the prompt."""
        problem = self.problem([*messages, ANSWER, USER], tools, prompt)
        if problem:
            raise BadInput(f"the model's chat template does not take {name}: {problem}")
        chat = _in_words([*prompt, *messages])
        history, new = chat[: len(prompt) + 1], chat[len(prompt) + 1 :]
        added = self._outcome(history, new, self._end_of(messages[0]), tools)
        if added is RewritesHistory:
            yield f"rewrites the history at {name}, which begins a new sequence"
        for message in history:
            if any(word in str(added) for word in WORD.findall(str(message))):
                yield f"writes a message of role {message['role']!r} again at {name}"

    def check_prompt(self, prompt: list[dict], tools: list[dict] | None = None):
        """Raises BadInput if the template does not show what each message of a prompt says."""
        if not prompt:
            return
        # Without reasoning, because many templates drop it in earlier turns.
        said = [message | {"reasoning_content": None} for message in prompt]
        problem = self.problem(said, tools)
        known = f"system developer user assistant tool {self.tokenizer.chat_template}"
        for role in [message["role"] for message in prompt if message["role"] not in known]:
            problem = problem or f"it does not know the role {role!r}"
        if prompt[-1]["role"] == "assistant":
            problem = problem or "it ends the assistant's last message, which can't be continued"
        if problem:
            raise BadInput(f"the model's chat template does not take this prompt: {problem}")


def _after(prompt, history):
    """Returns what a history has after the part that it shares with a prompt.

    With R1's prompt "U: 2+2 A: <think>", "U: 2+2 A: 4<EOS>" has "4<EOS>"."""
    n = len(commonprefix([prompt, history]))
    if n < len(prompt):
        n = len(re.sub(r"[<[][^]<>[\s]*$", "", prompt[:n]))  # without the start of a token: "<thi"
    return history[n:]


def split_reasoning(text: str, start: str, end: str, opened: bool) -> tuple[str | None, str]:
    """Splits an assistant's text into (reasoning, the rest). Reasoning is None without tags.

    Reasoning is everything up to the last end tag, plus anything after a later start tag:
    "<think>why</think>so<think>or" gives ("whyor", "so"). start, end: the tags. opened: whether the
    prompt ends with the start tag."""
    if opened:
        text = start + text
    before, has_end, after_end = text.rpartition(end)
    rest, has_start, unfinished = after_end.partition(start)
    if not has_end and not has_start:
        return None, text
    start_tag = r"^\s*" + re.escape(start)
    return re.sub(start_tag, "", before + unfinished), rest


# ---------------------------------------------------------------- templates of tokenizers


_cached_template = functools.lru_cache(maxsize=64)(ChatTemplate)


def chat_template(tokenizer, stops: Iterable[int] = (), think_tags=THINK_TAGS) -> ChatTemplate:
    """Returns the tokenizer's ChatTemplate, which is made once for the same arguments.

    stops: the ids that end a turn, in addition to the tokenizer's EOS."""
    stops = frozenset({*stops, tokenizer.eos_token_id} - {None})
    return _cached_template(tokenizer, stops, think_tags)


def render(tokenizer, messages: list[dict], tools=None, trusted=None) -> list[int]:
    """Returns the ids of a chat with its generation prompt: see `ChatTemplate.render`."""
    return chat_template(tokenizer).render(messages, tools, trusted)


@functools.lru_cache(maxsize=64)
def with_template_variables(tokenizer, variables: str):
    """Returns a copy of the tokenizer whose chat template gets these variables.

    variables: a JSON object. If it is empty, the tokenizer itself is returned. "strftime_now" is
    the date to write in place of today's."""
    variables = json.loads(variables)
    if not variables:
        return tokenizer
    date = variables.get("strftime_now")
    if date is not None:
        variables["strftime_now"] = lambda form: date
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed
