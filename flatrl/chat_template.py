"""What a model's chat template does: a chat as ids, and what new messages add to it.

`ChatTemplate.suffix` is what happens between two turns: the caller appends its ids to the prompt
and the sampled ids, which are never encoded again. To see what the template does with a text, the
text is replaced by a word such as Probe0001000. A word that is missing from the result is a text
that the template drops, and what follows the last word of a turn ends the turn. A chat is written
without and with its new messages, and the two are compared. Before the run, the same is done with
made-up chats."""

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, count
from os.path import commonprefix

from flatrl.bad_input import BadInput
from flatrl.texts import Texts


class RewritesHistory(ValueError):
    """A new sequence must begin, with the whole chat as its prompt (`Trajectory.fork`).

    Either the template now changes an earlier message, or drops a text of the last turn; or the
    policy ended that turn with another token than the template's."""


# ---------------------------------------------------------------- chats of words

MARK = "Probe"  # begins each word
WORD = re.compile(MARK + r"\d{7}")
FORK = "a new sequence"  # what `_outcome` returns where `_added` raises RewritesHistory


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


class Recent:
    """The part of a growing chat on which a suffix depends, unless the template `looks_far_back`.

    A round is a turn of the assistant and the messages that answer it. The part is what precedes
    the first turn, the last earlier round of each kind, and the latest round. So a template can
    look back at the last turn with a thought, for example."""

    def __init__(self):
        self.rounds = [[]]  # the first one precedes the assistant's first turn
        self.n_seen = 0

    def of(self, messages: list[dict]) -> list[dict]:
        """Returns that part of a chat, which must continue that of the last call."""
        for message in messages[self.n_seen :]:
            if message["role"] == "assistant":
                *earlier, latest = self.rounds
                others = [each for each in earlier if _kind(each) != _kind(latest)]
                self.rounds = [*others, latest, []]
            self.rounds[-1].append(message)
        self.n_seen = len(messages)
        return [*chain(*self.rounds)]


def _kind(messages):
    """Returns what a template can tell from messages without reading their words."""
    kind = []
    for message in messages:
        n_calls = len(message.get("tool_calls") or ())
        has_thought = bool(message.get("reasoning_content"))
        kind += [message["role"], bool(message.get("content")), has_thought, n_calls]
    return kind


def call_id(turn: int, number: int) -> str:
    """Returns the id of a call, by the numbers of turn and call; Mistral's has nine characters."""
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
TOOL_RESULT = "a tool's answer"
IN_TEXT = "an answer to a call in the text"
TWO_CALLS = "two calls in a turn"
USER_REPLY = "a user's answer"
# A round is a turn of the assistant with what answers it. Each is a function of its number.
ROUNDS = {
    USER_REPLY: lambda n: [ANSWER, USER],
    "reasoning": lambda n: [THOUGHT, USER],
    TOOL_RESULT: _called,
    "reasoning before a call": functools.partial(_called, reasoning_content="?"),
    "text before a call": functools.partial(_called, content="?"),
    TWO_CALLS: functools.partial(_called, n_calls=2),
    IN_TEXT: lambda n: [ANSWER, *_called(n)[1:]],
}
ROLES = ("system", "developer", "user", "assistant", "tool")  # of OpenAI's API

# ---------------------------------------------------------------- the template

THINK_TAGS = "<think> </think>"
PROMPT_TAIL = 64  # tokens at the end of a prompt, in which it may open a thought


class ChatTemplate:
    """What a model's chat template does. `suffix` is what happens between two turns.

    tokenizer: perhaps of `with_template_variables`. think_tags: the tags around reasoning.
    stops: the ids that end a turn; the attribute has those of the template, too.
    answer_end, call_end: the id that ends a turn without calls, and one with calls.
    shows_calls: whether it writes tool_calls. If not, calls stay in the text.
    lacks_thoughts, lacks_thoughts_beside_calls: whether it writes no reasoning_content, even in the
    last turn. `text` then puts it into the content.
    Raises BadInput if the tokenizer has no chat template."""

    def __init__(self, tokenizer, stops: Iterable[int] = (), think_tags: str = THINK_TAGS):
        if not tokenizer.chat_template:
            raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
        self.tokenizer = tokenizer
        self.texts = Texts(tokenizer)
        self.think_start, self.think_end = think_tags.split()
        start, end = map(re.escape, think_tags.split())
        self.empty_thought = re.compile(rf"{start}\s*{end}\s*")
        self._cached_ids = functools.lru_cache(maxsize=64)(self.texts.ids)
        # `text`, which writes the made-up chats below, reads these three.
        self.no_tools = None
        self.lacks_thoughts = self.lacks_thoughts_beside_calls = False
        if self.problem([USER]):  # Hermes-2-Pro's needs tools: an empty list will do
            self.no_tools = []
        hidden = [bool(self.problem([USER, turn])) for turn in (THOUGHT, CALL_AFTER_THOUGHT)]
        self.lacks_thoughts, self.lacks_thoughts_beside_calls = hidden
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
            is_hidden = self.lacks_thoughts
            if message.get("tool_calls"):
                is_hidden = self.lacks_thoughts_beside_calls
            if reasoning is not None and is_hidden:
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
            with_breaks = self.texts.with_breaks
            messages = [m if m in trusted else with_breaks(m, m["role"]) for m in messages]
        # Rollouts of a group begin with the same prompt.
        return list(self._cached_ids(self.text(messages, self.texts.with_breaks(tools), True)))

    # -- the suffix of a turn

    def suffix(
        self, messages: list[dict], new: list[dict], stop: int | None, tools=None, recent=None
    ) -> list[int]:
        """Returns the ids that `new` messages (of tools or users) add after an assistant's turn.

        They begin after the stop token with which the policy ended the turn. With Qwen2.5, if it
        sampled "Hi<|im_end|>" and the user says "2?", they are those of

            "\\n<|im_start|>user\\n2?<|im_end|>\\n<|im_start|>assistant\\n"

        stop: the stop token with which the turn ended. Without one (a stop string ended it, or a
            limit), the suffix begins with the template's.
        recent: a `Recent` that the caller keeps from turn to turn of one chat, for speed.

        Raises RewritesHistory if the template now writes the chat in another way: Qwen3 drops
        earlier reasoning, for example. Raises ValueError if it writes nothing for `new`."""
        if messages[-1]["role"] != "assistant":
            raise RewritesHistory("the chat does not end with a turn of the assistant")
        history = messages if self.looks_far_back else (recent or Recent()).of(messages)
        with_breaks = self.texts.with_breaks  # no text becomes a control token
        added = self._added(history, [*map(with_breaks, new)], stop, with_breaks(tools))
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
            new_tail  "<|im_end|>\\n<|im_start|>user\\n2?...", whose stop token was sampled"""
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
        new_head = self.empty_thought.sub("", new_head)
        if self.empty_thought.sub("", head) != new_head:
            # Muse Glimmer writes its system message only if a prompt follows, as in new_head.
            head, tail = _split(self.text(chat, tools, True), words)
        if self.empty_thought.sub("", head) != new_head:
            raise RewritesHistory("the chat template changes an earlier message")

        stop_text = self.tokenizer.decode([self._end_of(turn) if stop is None else stop])
        # Between the last word and the turn's own stop token is nothing, or syntax that ends a call
        # or a thought, which the policy has written, perhaps without spaces. tail begins with it,
        # too. If not, the stop token found is that of a later message.
        syntax, found, rest = new_tail.partition(stop_text)
        if found and tail.strip().startswith(syntax.strip()):
            return rest if stop is not None else stop_text + rest
        # GLM ends a turn with what begins a user's message. new_tail lacks it if others follow.
        if stop is None and not turn.get("tool_calls"):
            return new_tail
        raise RewritesHistory("the chat template ends this turn in another way")

    @functools.cached_property
    def looks_far_back(self) -> bool:
        """Whether a suffix depends on more of a chat than `Recent` keeps.

        Cohere's template numbers all calls, for example. Made-up chats of many rounds show it."""
        makers = []
        for make in ROUNDS.values():
            if self._written([USER, *make(1), ANSWER, USER]):
                makers.append(make)
        for last in makers:
            # Of each kind so many that `Recent` drops some.
            rounds = [make(n) for n, make in enumerate([*makers * 4, last], 1)]
            chat = _in_words([USER, *chain(*rounds)])
            n_new = len(rounds[-1]) - 1  # all but the turn
            history, new = chat[:-n_new], chat[-n_new:]
            whole = self._outcome(history, new)
            if whole and whole != self._outcome(Recent().of(history), new):
                return True
        return False

    def _outcome(self, history, new, stop=None, tools=None):
        """Returns what new messages add to a made-up chat, FORK or, if the template raises, ""."""
        try:
            return self._added(history, new, stop, tools)
        except RewritesHistory:
            return FORK
        except Exception:  # templates raise whatever they like
            return ""

    def _learn_ends(self, stops):
        """Sets stops, answer_end and call_end.

        A turn ends with the first special token after its words that is a known stop. If none is
        known, it is the first one or, if there is none, that of the next message (GLM), EOS or a
        given stop. An unknown token that also stands between two calls does not end a turn."""
        after_answer = self._special_after(ANSWER)
        known = [token for token in after_answer if token in stops]
        of_next = self._special_after(ANSWER, USER)
        eos = {self.tokenizer.eos_token_id} - {None}
        self.answer_end = [*known, *after_answer, *of_next, *eos, *stops][0]
        after_call = self._special_after(CALL) + self._special_after(CALL, RESULT)
        known = [token for token in after_call if token in stops | {self.answer_end}]
        two_calls, *_ = _called(1, 2)
        between = self._special_after(two_calls)
        others = [token for token in after_call if token not in between]
        self.call_end = [*known, *others, self.answer_end][0]
        self.stops = {*stops, self.answer_end, self.call_end}

    def _special_after(self, *messages):
        """Returns the special tokens after the first of these messages' words, up to the next."""
        chat = [USER, *messages]
        if self.problem(chat):
            return []
        _, _, after, *_ = WORD.split(self.text(_in_words(chat)))  # the user's word comes first
        return self.texts.special_ids(after)

    def _end_of(self, turn):
        """Returns the id of the token that ends a message of the assistant."""
        return self.call_end if turn.get("tool_calls") else self.answer_end

    # -- what the policy said

    def _learn_frames(self):
        """Sets what the template writes around a thought and an answer.

        thought_pattern: finds a thought that special tokens enclose in place of think_tags, in
            gpt-oss "<|channel|>analysis<|message|>(.*?)<|end|><|start|>assistant"; else None.
        channel: the special token that begins such a thought, or "". tools.py cuts it from calls.
        after_thought: what is between think_tags and an answer, such as "\\n\\n"."""
        self.before_answer = self.after_answer = self.after_thought = self.channel = ""
        self.thought_pattern = None
        if self.problem([USER, ANSWER]):
            return
        (answer,) = _in_words([ANSWER])
        written = self.turn_text(answer).partition(answer["content"])
        self.before_answer, _, self.after_answer = written

        # Gemma 4 writes thoughts in turns with calls alone.
        only_beside_calls = self.lacks_thoughts and not self.lacks_thoughts_beside_calls
        (turn,) = _in_words([CALL_AFTER_THOUGHT if only_beside_calls else THOUGHT])
        before, _, after = self.turn_text(turn).partition(turn["reasoning_content"])
        after = WORD.split(after)[0]  # up to the answer or the call
        tokens_before = self.texts.special_starts.findall(before)
        tokens_after = self.texts.special_starts.findall(after)
        if tokens_before and tokens_after and self.think_end not in after:
            self.channel = tokens_before[0]
            end = after.removesuffix(self.before_answer)
            if only_beside_calls:  # what follows the first special token is the call
                end = after.partition(tokens_after[0])[0] + tokens_after[0]
            begin, end = re.escape(before.strip()), re.escape(end.strip())
            self.thought_pattern = re.compile(f"{begin}(.*?)(?:{end}|$)", re.DOTALL)
        self.after_thought = after.partition(self.think_end)[2]

    def read(self, text: str, opened: bool) -> tuple[str | None, str]:
        """Splits a sampled turn, without its stop token, into (reasoning or None, the rest).

        Reasoning is what think_tags enclose (`split_reasoning`), or what is in the template's own
        channel for it. The rest has tool calls, or is the answer without its frame.

        text: with special tokens. opened: whether the prompt opened the thought."""
        if self.thought_pattern:
            thoughts = [thought.strip() for thought in self.thought_pattern.findall(text)]
            reasoning = "\n".join(thoughts) if thoughts else None
            text = self.thought_pattern.sub("", text)
        else:
            reasoning, text = split_reasoning(text, self.think_start, self.think_end, opened)
            if reasoning is not None:
                text = text.removeprefix(self.after_thought)
        if self.before_answer.strip():
            text = text.rpartition(self.before_answer.strip())[2]
        return reasoning, text.removesuffix(self.after_answer)

    @functools.cached_property
    def frame_ids(self) -> set[int]:
        """The special tokens with which the template or the tokenizer frames what is said."""
        named = [*self.tokenizer.special_tokens_map.values()]  # EOS, padding
        ids = {*self.stops, *self.tokenizer.convert_tokens_to_ids(named)}
        for make in ROUNDS.values():
            text = self._written([USER, *make(1), ANSWER, USER])
            ids.update(self.texts.special_ids(text))
        return ids

    # -- a turn of a demonstration

    def turn_ids(self, turn: dict, prompt_ids: Sequence[int] = (), number: int = 1) -> list[int]:
        """Returns the ids of an assistant's turn, including the stop token that ends it.

        They are what the template writes. A content or a thought that it drops is put back. If the
        prompt opens a thought, the turn ends it. Raises ValueError if the turn is empty, if the
        template hides its calls, or if it has a stop token inside.

        prompt_ids: what precedes the turn, by default a user's question. number: that of the turn,
        for the ids of its calls, which their results repeat."""
        turn = {"content": ""} | turn
        calls = turn.get("tool_calls", ())
        if calls:
            made = [call | {"id": call_id(number, i)} for i, call in enumerate(calls)]
            turn["tool_calls"] = made
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
        written = _difference(prompt, self.text([USER, turn], tools))
        # If the text does not begin with the prompt, its header is still there (Llama 4).
        header = _difference(self.text([USER], tools), prompt).lstrip()
        if header and written.lstrip().startswith(header):
            written = written.partition(header)[2]
        return written.partition(self.tokenizer.decode([self._end_of(turn)]))[0]

    def _completed(self, written, turn, before):
        """Returns a written turn with what the template left out of it. before: its prompt."""
        # A template may open a thought after a user's question alone (R1).
        opened = before.endswith(self.think_start)
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

    def _written(self, messages):
        """Returns made-up messages as the template writes them, in words; "" if it raises."""
        try:
            return self.text(_in_words(messages))
        except Exception:  # templates raise whatever they like
            return ""

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
            messages = ROUNDS[TOOL_RESULT if self.shows_calls else IN_TEXT](1)
            warnings += self._check_round(TOOL_RESULT, messages, prompt, tools)
            if self.shows_calls and not self.accepts(TWO_CALLS):
                warnings.append(
                    "takes one call in a turn: give --agent_args '{\"max_parallel_calls\": 1}'"
                )
            if self.text(prompt, tools) == self.text(prompt):
                warnings.append("ignores tools: describe them in the prompt")
        if has_user:
            warnings += self._check_round(USER_REPLY, ROUNDS[USER_REPLY](1), prompt, tools)
        # The keywords are those of `with_template_variables`.
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
        if added == FORK:
            yield f"rewrites the history at {name}, which begins a new sequence"
        for message in history:
            if any(word in added for word in WORD.findall(str(message))):
                yield f"writes a message of role {message['role']!r} again at {name}"

    def check_prompt(self, prompt: list[dict], tools: list[dict] | None = None):
        """Raises BadInput for a text that the template hides, a strange role, or an answer last."""
        if not prompt:
            return
        # Without reasoning, because many templates drop it in earlier turns.
        said = [message | {"reasoning_content": None} for message in prompt]
        problem = self.problem(said, tools)
        # Many templates write any role. So one must be OpenAI's, or in the template's source.
        source = str(self.tokenizer.chat_template)
        for message in prompt:
            if message["role"] not in ROLES and message["role"] not in source:
                problem = problem or f"it does not know the role {message['role']!r}"
        if prompt[-1]["role"] == "assistant":
            problem = problem or "it ends the assistant's last message, which can't be continued"
        if problem:
            raise BadInput(f"the model's chat template does not take this prompt: {problem}")


def _difference(prompt, text):
    """Returns what a text has after the part that it shares with a prompt.

    R1's prompt may open a thought that its history lacks: "U: 2+2 A: <think>" and
    "U: 2+2 A: 4<EOS>" share "U: 2+2 A: ". The "<t" of "<think>" and "<tool>" is not shared."""
    n = len(commonprefix([prompt, text]))
    if n < len(prompt):
        begun_token = r"[<[][^]<>[\s]*$"
        n = len(re.sub(begun_token, "", prompt[:n]))
    return text[n:]


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


def chat_template(
    tokenizer, stops: Iterable[int] = (), think_tags: str = THINK_TAGS
) -> ChatTemplate:
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
