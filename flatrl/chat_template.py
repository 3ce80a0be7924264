"""What a model's chat template does: a chat as ids, and what new messages add to it.

The template is never read, only used. Made-up chats show what it does. Each of their texts is a
word of its own, so a word that is missing was left out, and what follows the last word ends the
turn. `ChatTemplate.suffix` does the same with a real chat: words stand in for what the policy
said, because the policy's own tokens are in the sequence already."""

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from os.path import commonprefix

from flatrl.bad_input import BadInput
from flatrl.user_code import TOKEN_BREAK, clean


class RewritesHistory(ValueError):
    """New messages make the template change earlier ones, so a new sequence must begin."""


# ---------------------------------------------------------------- texts and control tokens


class Texts:
    """Turns texts into ids so that no text from outside becomes a control token.

    Control tokens are the special tokens and markup such as <tool_call>: added tokens that begin
    with punctuation, have a letter and no space."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.controls = {}  # id -> token
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special or re.fullmatch(r"[^\w\s]\S*\w\S*", token.content):
                self.controls[number] = token
        tokens = self.controls.values()
        self.control = _start_of_any(token.content for token in tokens)
        self.special = _start_of_any(token.content for token in tokens if token.special)

    def plain(self, value, role: str = "user"):
        """Returns a message or a list of tools in which no text becomes a control token.

        A tool that says "so<|im_end|>" must not end its message. So a break is put wherever a
        control token begins. Messages of the assistant and the system keep their markup: the
        policy samples it, and system prompts show it in examples."""
        control = self.special if role in ("assistant", "system") else self.control
        return _edited(value, lambda text: control.sub(TOKEN_BREAK, clean(text)))

    def ids(self, text: str, begins: bool = True) -> list[int]:
        """Returns the ids of a text. No token spans a break, or is a control token after one.

        begins: whether the text begins a sequence. If not, the tokenizer puts no space before it.
        No special tokens are added, because the template writes them all, BOS included."""
        # Some templates write arguments and tools as Python or JSON does, with escapes.
        first, *pieces = text.replace("\\ufdd0", TOKEN_BREAK).split(TOKEN_BREAK)
        ids = self._encoded(first, begins)
        for piece in pieces:
            for number in self._encoded(piece[:1], False):
                if number not in self.controls:
                    ids.append(number)
            ids += self._encoded(piece[1:], False)
        return ids

    def _encoded(self, text, begins):
        # After the EOS token, so that no space is put before the first word.
        start = "" if begins else self.tokenizer.eos_token or ""
        ids = self.tokenizer.encode(start + text, add_special_tokens=False)
        return ids[1:] if start else ids

    def special_ids(self, text: str) -> list[int]:
        """Returns the ids of the special tokens in a text."""
        tokens = [match[1] for match in self.special.finditer(text)]
        return self.tokenizer.convert_tokens_to_ids(tokens)


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


# ---------------------------------------------------------------- made-up chats

MARK = "Probe"  # begins each word of a made-up chat
PROMPT_TAIL = 64  # tokens at the end of a prompt, in which it may open a thought


def call_id(turn: int, number: int) -> str:
    """Returns the id of a tool call: nine characters, as Mistral's template requires.

    turn: the number of the assistant's turn. number: that of the call within the turn."""
    return f"{turn:06d}{number:03d}"


def function_call(call_id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def _calls(turn, n=1, **said):
    """Returns a made-up turn with n calls."""
    calls = [function_call(call_id(turn, i), "probe", {"text": "?"}) for i in range(n)]
    return {"role": "assistant", "content": "", **said, "tool_calls": calls}


def _results(turn, n=1):
    """Returns the messages with the results of these calls."""
    result = {"role": "tool", "name": "probe", "content": "?"}
    return [result | {"tool_call_id": call_id(turn, i)} for i in range(n)]


SYSTEM, USER, ANSWER = ({"role": role, "content": "?"} for role in ("system", "user", "assistant"))
HELLO = {"role": "user", "content": "hello"}
THOUGHT = ANSWER | {"reasoning_content": "?"}
IN_TEXT = "an answer to a call in the text"
ROLES = ("system", "developer", "user", "assistant", "tool")  # of OpenAI's API
# A round is a turn of the assistant with what answers it. Each is a function of its number.
ROUNDS = {
    "a user's answer": lambda n: [ANSWER, USER],
    "reasoning": lambda n: [THOUGHT, USER],
    "a tool's answer": lambda n: [_calls(n), *_results(n)],
    "reasoning before a call": lambda n: [_calls(n, reasoning_content="?"), *_results(n)],
    "text before a call": lambda n: [_calls(n, content="?"), *_results(n)],
    "two calls in a turn": lambda n: [_calls(n, 2), *_results(n, 2)],
    IN_TEXT: lambda n: [ANSWER, *_results(n)],
}


def _worded(message, number):
    """Returns (the message with a word in place of each of its texts, these words).

    number: that of the message in its chat, so that no two words are equal."""
    words = []

    def word():
        words.append(f"{MARK}{number:04d}{len(words):03d}")
        return words[-1]

    message = dict(message)
    for key in ("reasoning_content", "content"):
        said = message.get(key)
        if isinstance(said, list):
            message[key] = [part | {"text": word()} if part.get("text") else part for part in said]
        elif said and said.strip():
            message[key] = word()
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            function = call["function"] | {"arguments": {"text": word()}}
            calls.append(call | {"function": function})
        message["tool_calls"] = calls
    return message, words


def _made_up(messages):
    """Returns messages with a word in place of each text, and {word: the role of its message}."""
    chat = []
    roles = {}
    for number, message in enumerate(messages):
        message, words = _worded(message, number)
        chat.append(message)
        roles |= dict.fromkeys(words, message["role"])
    return chat, roles


class Recent:
    """The part of a growing chat that a suffix depends on. Its length does not grow.

    It is what precedes the assistant's first turn, the last earlier round of each kind, and the
    latest round. So a template can look back at the last turn with a thought, for example."""

    def __init__(self):
        self.start = []
        self.rounds = {}  # kind -> the last earlier round
        self.latest = []  # the latest round
        self.n_seen = 0

    def of(self, messages: list[dict]) -> list[dict]:
        """Returns the recent part of a chat, which must continue that of the last call."""
        for message in messages[self.n_seen :]:
            if message["role"] == "assistant":
                if self.latest:
                    kind = tuple(map(_kind, self.latest))
                    self.rounds.pop(kind, None)  # so that the rounds stay in order
                    self.rounds[kind] = self.latest
                self.latest = [message]
            else:
                (self.latest or self.start).append(message)
        self.n_seen = len(messages)
        return [*self.start, *chain(*self.rounds.values()), *self.latest]


def _kind(message):
    """Returns what a template can tell from a message without reading its words."""
    blank = []
    for text in (message.get("content"), message.get("reasoning_content")):
        blank.append(not text or (isinstance(text, str) and text.isspace()))
    return message["role"], *blank, len(message.get("tool_calls") or ())


def _split(text, words):
    """Returns a text up to the last of the words in it, and the rest.

    Raises RewritesHistory unless all words are in the text."""
    places = [text.rfind(word) for word in words]
    if -1 in places:
        raise RewritesHistory("the chat template leaves out what the assistant said")
    end = max(places) + len(words[0])  # all have the same length
    return text[:end], text[end:]


def _difference(prompt, history):
    """Returns two texts: the end of a prompt that a history lacks, and what that has in its place.

    R1's prompt "U: 2+2 A: <think>" and its history "U: 2+2 A: 4<EOS>" give "<think>", "4<EOS>"."""
    n = len(commonprefix([prompt, history]))
    if n < len(prompt):
        n = len(re.sub(r"[<[][^]<>[\s]*$", "", prompt[:n]))  # without the start of a token: "<thi"
    return prompt[n:], history[n:]


# ---------------------------------------------------------------- the template


class ChatTemplate:
    """What a model's chat template does. `suffix` is what happens between two turns.

    tokenizer: with the variables of the template. think_tags: the tags around reasoning.
    stops: the ids that end a turn; the attribute has those of the template, too.
    answer_end, call_end: the ids with which it ends an answer and a turn with calls, or None.

    Raises BadInput if the tokenizer has no chat template."""

    def __init__(self, tokenizer, stops: Iterable[int] = (), think_tags: str = "<think> </think>"):
        if not tokenizer.chat_template:
            raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
        self.tokenizer = tokenizer
        self.texts = Texts(tokenizer)
        self.think_start, self.think_end = think_tags.split()
        start, end = map(re.escape, (self.think_start, self.think_end))
        self.empty_thought = re.compile(rf"{start}\s*{end}\s*")
        self._remembered_ids = functools.lru_cache(maxsize=64)(self.texts.ids)
        # `problem` reads these two attributes, so they have a value before the right one is found.
        # A template for chats with tools alone (Hermes-2-Pro) raises without a list: [] will do.
        self.no_tools = None
        self.no_tools = [] if self.problem([USER]) else None
        # Whether the template knows reasoning beside a call (True) or not (False).
        self.shows_reasoning = {False: True, True: True}
        self.shows_reasoning = {
            False: not self.problem([USER, THOUGHT]),
            True: not self.problem([USER, _calls(1, reasoning_content="?")]),
        }
        self.stops = {*stops}
        self.answer_end = self._end(ANSWER, USER)
        self.stops |= {self.answer_end} - {None}
        self.call_end = self._end(_calls(1), *_results(1))
        self.stops |= {self.call_end} - {None}

    # -- a whole chat

    def text(self, messages: list[dict], tools=None, add_generation_prompt=False, **variables):
        """Returns a chat as the template writes it. Raises whatever the template raises.

        Reasoning moves into the content, if the template has no place for it."""
        chat = []
        for message in messages:
            message = dict(message)
            reasoning = message.pop("reasoning_content", None)
            if reasoning is not None:
                if self.shows_reasoning["tool_calls" in message]:
                    message["reasoning_content"] = reasoning
                    message["thinking"] = reasoning  # its name in gpt-oss
                else:
                    thought = f"{self.think_start}{reasoning}{self.think_end}"
                    message["content"] = thought + (message.get("content") or "")
            chat.append(message)
        return self.tokenizer.apply_chat_template(
            chat,
            tools=tools or self.no_tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

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
        return list(self._remembered_ids(self.text(messages, self.texts.plain(tools), True)))

    # -- the suffix of a turn

    def suffix(
        self,
        messages: list[dict],
        new: list[dict],
        stop: int | None,
        tools: list[dict] | None = None,
        recent: Recent | None = None,
    ) -> list[int]:
        """Returns the ids that `new` messages (of tools or users) add after an assistant's turn.

        They begin after the stop token with which the policy ended the turn. With Qwen2.5, if it
        sampled "Hi<|im_end|>" and the user says "2?", they are those of

            "\\n<|im_start|>user\\n2?<|im_end|>\\n<|im_start|>assistant\\n"

        stop: the stop token with which the turn ended. Without one (a stop string ended it, or a
            limit), the suffix begins with the template's.
        recent: kept by the caller from turn to turn of one chat, for speed.

        Raises RewritesHistory if the template now writes the chat in another way: Qwen3 drops
        earlier reasoning, for example. Raises ValueError if it writes nothing for `new`."""
        if messages[-1]["role"] != "assistant":
            raise RewritesHistory("the chat does not end with a turn of the assistant")
        history = messages
        if not self.looks_far_back:
            history = (recent or Recent()).of(messages)
        added = self._added(history, [self.texts.plain(message) for message in new], stop, tools)
        if not added:
            role = new[-1]["role"]
            raise ValueError(f"the chat template writes nothing for a message of role {role!r}")
        return self.texts.ids(added, begins=False)

    def _added(self, history, new, stop, tools=None):
        """Returns the text that `new` messages add to a history that ends with a turn.

        The template gets words in place of what the assistant said. They show where the turn ends,
        and whether the template leaves some out."""
        *earlier, turn = history
        said = turn.get("content") or ""
        if not turn.get("tool_calls"):
            turn = turn | {"content": "?"}  # becomes a word, even if the answer is empty
        elif self.hides_text_beside_calls:
            turn = turn | {"content": ""}
        chat = []
        for number, message in enumerate(earlier):
            is_said = message["role"] == "assistant"
            chat.append(_worded(message, number)[0] if is_said else message)
        turn, words = _worded(turn, len(chat))
        head, tail = _split(self.text([*chat, turn], tools), words)
        new_head, new_tail = _split(self.text([*chat, turn, *new], tools, True), words)
        # Qwen3 writes an empty thought into the last turn alone.
        if self.empty_thought.sub("", head) != self.empty_thought.sub("", new_head):
            raise RewritesHistory("the chat template changes an earlier message")

        usual = self.call_end if turn.get("tool_calls") else self.answer_end
        stop_text = self._token(usual if stop is None else stop) or MARK  # no text has MARK here
        # Between the last word and the stop token is what ends a call or a thought.
        syntax, found, rest = new_tail.partition(stop_text)
        if stop is not None:
            if not found or not tail.strip().startswith(syntax.strip()):
                raise RewritesHistory("the chat template ends this turn in another way")
            return rest
        added = new_tail
        if found and tail.startswith(syntax):  # the policy wrote the syntax, but no stop token
            added = found + rest
        space = said[len(said.rstrip()) :]  # which the policy wrote, and the template trims
        return added.removeprefix(space)

    @functools.cached_property
    def looks_far_back(self) -> bool:
        """Whether a suffix depends on more of a chat than `Recent` keeps.

        Cohere's template numbers all calls, for example. In the made-up chats that show it, a round
        follows two of its kind, or many of all kinds. This is tested, not proved."""
        kinds = []
        for make in ROUNDS.values():
            if not self.problem([USER, *make(1), ANSWER, USER]).startswith("it raises"):
                kinds.append(make)
        for last in kinds:
            for makes in ([last] * 3, [*kinds * 4, last]):
                rounds = [make(n) for n, make in enumerate(makes, 1)]
                chat, _ = _made_up([USER, *chain(*rounds)])
                n_new = len(rounds[-1]) - 1
                history, new = chat[:-n_new], chat[-n_new:]
                whole = self._outcome(history, new)
                if whole and whole != self._outcome(Recent().of(history), new):
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

    def _end(self, turn, *reply):
        """Returns the id of the token that ends a made-up turn, or None.

        It is the first special token after the turn or, without one, that with which the next
        message begins (GLM). Calls may have special tokens of their own. So a turn with calls ends
        at a known stop token, or else at the first one that is not between two calls."""
        chat, _ = _made_up([USER, turn, *reply])
        _, words = _worded(turn, 1)
        try:
            alone = _split(self.text(chat[:2]), words)[1]
            answered = _split(self.text(chat), words)[1]
        except Exception:  # templates raise whatever they like
            return None
        found = self.texts.special_ids(alone + answered.partition(MARK)[0])
        if turn.get("tool_calls"):
            inner = []
            with suppress(Exception):  # templates raise whatever they like
                two, _ = _made_up([USER, _calls(1, 2)])
                _, _, between, _ = re.split(rf"{MARK}\d+", self.text(two))
                inner = self.texts.special_ids(between)
            known = [token for token in found if token in self.stops]
            found = known or [token for token in found if token not in inner]
        return found[0] if found else None

    def _token(self, number):
        """Returns the text of a token, "" for None."""
        return "" if number is None else self.tokenizer.decode([number])

    @functools.cached_property
    def frames(self) -> list[str]:
        """Four texts that the template writes within a turn, each "" where there is none.

        They stand before a thought, from there to an answer, before an answer without a thought,
        and from an answer to the end of the turn. Those of gpt-oss begin "<|channel|>analysis",
        "<|end|><|start|>assistant<|channel|>final" and "<|channel|>final"."""
        thinking = THOUGHT
        if self.shows_reasoning[True] and not self.shows_reasoning[False]:  # Gemma 4
            thinking = _calls(1, reasoning_content="?")
        frames = []
        for turn in (thinking, ANSWER):
            chat, roles = _made_up([USER, turn])
            pieces = ["", ""]
            with suppress(Exception):  # templates raise whatever they like
                prompt = self.text(chat[:1], add_generation_prompt=True)
                _, written = _difference(prompt, self.text(chat))
                found = re.split(rf"{MARK}\d+", written)
                if len(found) == len(roles):  # the words of the turn, and one piece more
                    pieces = found[:2]
            frames += pieces
        frames[3] = frames[3].partition(self._token(self.answer_end) or MARK)[0]
        if thinking is not THOUGHT:  # a call follows the end of the thought
            for end in self.texts.special_ids(frames[1])[:1]:
                before, end, _ = frames[1].partition(self._token(end))
                frames[1] = before + end
        return frames

    @functools.cached_property
    def channel(self) -> list[str] | None:
        """The special tokens that begin and end a thought in a channel of the template, or None."""
        thought, after, *_ = self.frames
        begin = self.texts.special_ids(thought)
        end = self.texts.special_ids(after)
        if not (begin and end) or self.think_end in after:
            return None
        return [self._token(begin[0]), self._token(end[0])]

    def read(self, text: str, opened: bool) -> tuple[str | None, str]:
        """Splits a sampled turn, without its stop token, into (reasoning, the rest).

        Reasoning is what think_tags enclose (`split_reasoning`), or what is in the template's own
        channel for it; None without any. The rest has tool calls, or is the answer without the
        frame that the template puts around it.

        text: with special tokens. opened: whether the prompt opened the thought."""
        thought, after, before, end = self.frames
        if self.channel:
            close = self.channel[1]
            again = after.partition(close)[2].removesuffix(before)  # "<|start|>assistant"
            pattern = rf"{re.escape(thought.strip())}(.*?)(?:{re.escape(close + again)}|$)"
            thoughts = re.findall(pattern, text, re.DOTALL)
            reasoning = "\n".join(map(str.strip, thoughts)) if thoughts else None
            text = re.sub(pattern, "", text, flags=re.DOTALL)
        else:
            reasoning, text = split_reasoning(text, self.think_start, self.think_end, opened)
            if reasoning is not None:
                text = text.removeprefix(after.partition(self.think_end)[2])
        if before.strip() and before.strip() in text:
            text = text.rpartition(before.strip())[2]
        return reasoning, text.removesuffix(end)

    def turn_ids(self, turn: dict, prompt_ids: Sequence[int] = (), number: int = 1) -> list[int]:
        """Returns the ids of an assistant's turn, including the stop token that ends it.

        They are the ids of what the template writes after a generation prompt or, if that lacks
        the turn's content (some templates drop reasoning), of the content itself. If the prompt
        opens a thought, the turn ends it.

        prompt_ids: what precedes the turn, by default a user's question. number: that of the turn,
        for the ids of its calls, which their results repeat.

        Raises ValueError if the policy could not sample the turn: if it is empty, if the template
        does not show its calls, or if a stop token occurs inside it."""
        turn = {"content": ""} | turn
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        if calls:
            turn["tool_calls"] = [
                function_call(call_id(number, i), call["name"], call["arguments"])
                for i, call in enumerate(calls)
            ]
        stop = self.call_end if calls else self.answer_end
        if stop is None:
            stop = self.tokenizer.eos_token_id
        prompt = self.text([HELLO], add_generation_prompt=True)
        _, written = _difference(prompt, self.text([HELLO, turn]))
        written = written.partition(self._token(stop))[0]
        before = self.tokenizer.decode(prompt_ids[-PROMPT_TAIL:]) or prompt
        written = self._with_thought(written, turn, before)
        # After the prompt, because some tokenizers put a space before words in other places.
        start = self.texts.ids(prompt)
        ids = self.texts.ids(prompt + written)
        if ids[: len(start)] == start:
            ids = ids[len(start) :]
        else:
            ids = self.texts.ids(written, begins=False)
        shows_calls = all(call["name"] in written for call in calls)
        says_stop = any(self._token(each) in str(turn) for each in self.stops)
        if not ids or not shows_calls or says_stop or not self.stops.isdisjoint(ids):
            raise ValueError(f"the policy could not say this turn of a demonstration: {turn}")
        return [*ids, stop]

    def _with_thought(self, written, turn, before):
        """Returns a written turn with what the template left out of it. before: its prompt."""
        opened = before.rstrip().endswith(self.think_start)  # not so R1's after a tool's answer
        if not turn.get("tool_calls") and turn["content"].strip() not in written:
            written = turn["content"]
        for tag in (self.think_start, self.think_end):
            if before.rstrip().endswith(tag):
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
        chat, roles = _made_up(messages)
        try:
            text = self.text([*history, *chat], tools)
        except Exception as error:  # templates raise whatever they like
            return f"it raises {error!r:.200}"
        for word, role in roles.items():
            if word not in text:
                return f"it leaves out what a message of role {role!r} says"
        return ""

    def accepts(self, name: str) -> bool:
        """Returns whether the template accepts one of the ROUNDS, and a turn after it."""
        return not self.problem([USER, *ROUNDS[name](1), ANSWER, USER])

    @functools.cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows tool_calls. If not, calls stay in the text."""
        return not self.problem([USER, _calls(1)])

    @functools.cached_property
    def hides_text_beside_calls(self) -> bool:
        """Whether the template shows calls, but no text beside them."""
        return self.shows_calls and bool(self.problem([USER, _calls(1, content="?")]))

    def check(self, prompt: list[dict], tools: list[dict], has_user: bool) -> list[str]:
        """Checks a task's chats: a prompt, calls of tools, replies of a simulated user.

        Returns warnings. Raises BadInput if the template does not accept them."""
        self.check_prompt(prompt, tools)
        rounds = {}
        if tools:
            name = "a tool's answer"
            rounds[name] = ROUNDS[name if self.shows_calls else IN_TEXT](1)
        if has_user:
            name = "a user's answer"
            rounds[name] = ROUNDS[name](1)
        warnings = []
        for name, messages in rounds.items():
            # The prompt may end with a message that the round can't follow.
            problem = self.problem([USER, *messages, ANSWER, USER])
            problem = problem or self.problem(messages, tools, prompt)
            if problem:
                raise BadInput(
                    f"the model's chat template does not take {name}: {problem}. Choose another "
                    "model, or change the template (chat_template.jinja in the model's folder)"
                )
            chat, _ = _made_up([USER, *messages])
            stop = self.call_end if "tool_calls" in chat[1] else self.answer_end
            if self._outcome(chat[:2], chat[2:], stop, tools) is RewritesHistory:
                warnings.append(f"rewrites the history at {name}, which begins a new sequence")
        if tools and self.hides_text_beside_calls:
            warnings.append("hides a text beside a call: the rollout keeps it")
        if tools and self.shows_calls and not self.accepts("two calls in a turn"):
            warnings.append(
                """takes one tool call in a turn: give --agent_args '{"max_parallel_calls": 1}'"""
            )
        warnings += self._warnings_about(prompt, tools)
        return [f"the chat template {warning}" for warning in warnings]

    def _warnings_about(self, prompt, tools):
        """Yields warnings: tools that are ignored, a date, a message that is written again."""
        written = self.text(prompt, tools, True)
        if tools and written == self.text(prompt, None, True):
            yield "ignores tools: the policy does not see any. Describe them in the prompt"
        if "strftime_now" not in getattr(self.tokenizer.apply_chat_template, "keywords", {}):
            dated = self.text(prompt, tools, True, strftime_now=lambda form: MARK)
            if MARK in dated:
                yield (
                    "writes today's date. So that runs can be repeated, fix it: "
                    """--chat_template_args '{"strftime_now": "26 Jul 2024"}'"""
                )
        start = [SYSTEM] if prompt[0]["role"] == "system" else []
        chat, roles = _made_up([*start, USER, ANSWER, USER])
        added = str(self._outcome(chat[:-1], chat[-1:], None, tools))
        for word, role in roles.items():
            if word in added and word not in str(chat[-1]):
                yield f"writes a message of role {role!r} again at each user's turn"

    def check_prompt(self, prompt: list[dict], tools: list[dict] | None = None):
        """Raises BadInput if the template does not show what each message of a prompt says.

        Reasoning is not checked, because many templates drop it in earlier turns."""
        if not prompt:
            return
        said = [message | {"reasoning_content": None} for message in prompt]
        problem = self.problem(said, tools)
        if not tools and self.no_tools is not None:
            problem = problem or "it takes chats with tools only"
        for message in prompt:
            role = message["role"]
            if role not in ROLES and role not in str(self.tokenizer.chat_template):
                problem = problem or f"it does not know the role {role!r}"
        if prompt[-1]["role"] == "assistant":
            problem = problem or "it ends the assistant's last message, which can't be continued"
        if problem:
            raise BadInput(f"the model's chat template does not take this prompt: {problem}")


def split_reasoning(text: str, start: str, end: str, opened: bool) -> tuple[str | None, str]:
    """Splits an assistant's text into (reasoning, the rest). Reasoning is None without tags.

    Reasoning is everything up to the last end tag, plus anything after a later start tag:
        "<think>why</think>so"        ("why", "so")
        "why</think>so"               ("why", "so")
        "\\n<think>why</think>so"      ("why", "so"): GLM writes the newline
        "why</think>so<think>or"      ("whyor", "so")
        "why", opened                 ("why", "")
        "so", not opened              (None, "so")

    start, end: the tags. opened: whether the prompt ends with the start tag."""
    if opened:
        text = start + text
    before, has_end, after_end = text.rpartition(end)
    rest, has_start, unfinished = after_end.partition(start)
    if not has_end and not has_start:
        return None, text
    start_tag = r"^\s*" + re.escape(start)
    return re.sub(start_tag, "", before + unfinished), rest


@functools.lru_cache(maxsize=64)
def _chat_template(tokenizer, template, stops, think_tags):
    """Returns a ChatTemplate (cached). template: a changed one is learned again."""
    return ChatTemplate(tokenizer, stops, think_tags)


def chat_template(
    tokenizer, stops: Iterable[int] = (), think_tags: str = "<think> </think>"
) -> ChatTemplate:
    """Returns the tokenizer's ChatTemplate, which is made once for the same arguments.

    stops: the ids that end a turn, in addition to the tokenizer's EOS."""
    stops = frozenset({*stops, tokenizer.eos_token_id} - {None})
    return _chat_template(tokenizer, str(tokenizer.chat_template), stops, think_tags)


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
