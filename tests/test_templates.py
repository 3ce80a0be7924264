"""Conversations under the chat templates of several models (tests/chat_templates.py).

A rollout is what the whole chat is when it is rendered at once; or it forks, where a template
rewrites the history; or the template is refused before the run.
"""

import copy
import json
import random
import re
from types import SimpleNamespace

import chat_templates
import pytest
from chat_templates import BODY, CHAT, FAMILIES, KINDS, PROMPTS
from test_agent_loop import (
    ANSWER,
    ASSISTANT,
    CALCULATOR,
    END,
    PROMPT,
    SUM,
    Quiz,
    call,
    called,
    encode,
    quiz_row,
    quiz_task,
    rollout,
    with_template,
)
from tokenizers import AddedToken, normalizers

import agent_loop
from agent_loop import (
    BadInput,
    ChatTemplate,
    LoopArgs,
    RewritesHistory,
    SingleTurnLoop,
    chat_template,
    render,
)
from examples import calculator
from flatrl import chat_template as templates
from flatrl.models import stop_token_ids
from flatrl.rows import check_tokenizer

A_CALL = [
    {"role": "assistant", "content": "", "tool_calls": called(("add", {"a": 1}))},
    {"role": "tool", "content": "3", "tool_call_id": "000001000"},
]
ONE_ANSWER = (True, "", 0.5, {})
AGAIN = (False, "And again?", 0.25, {})


@pytest.fixture
def qwen3(tokenizer):
    return chat_templates.tokenizer_for("qwen3", tokenizer)


def play(tokenizer, task, row, stop_ids, *lines, **flags):
    """Runs a rollout; returns its outputs and the scripted engine."""
    sampling = {"stop_token_ids": stop_ids}
    return rollout(tokenizer, *lines, task=task, row=row, sampling=sampling, **flags)


# ---------------------------------------------------------------- the whole chat at once

def template_of(name, tokenizer) -> ChatTemplate:
    """The template with the stop tokens of the family's generation_config.json."""
    other = chat_templates.tokenizer_for(name, tokenizer)
    stops = chat_templates.stop_ids(name, other) if name in FAMILIES else ()
    return chat_template(other, stops)


def random_chat(template, seed, n_rounds=8):
    """A chat of rounds that the template takes, with words of its own, and what may be dropped."""
    makes = [make for name, make in templates.ROUNDS.items() if template.accepts(name)]
    makes.append(templates.ROUNDS["reasoning"])  # which some drop with the next question
    numbers = random.Random(seed)
    messages = [templates.USER]
    for number in range(1, n_rounds + 1):
        messages += numbers.choice(makes)(number)
    chat = templates._in_words(messages)
    return json.loads(json.dumps(chat).replace(templates.MARK, "Word"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rollout_has_the_ids_of_the_whole_chat(name, tokenizer):
    """The policy says each turn as the template writes it. Empty blocks of thought may stay."""
    template = template_of(name, tokenizer)
    loop = SingleTurnLoop(None, template.tokenizer, None, None, LoopArgs(max_response_tokens=10**6))
    chat = random_chat(template, 0)
    trajectory = loop.start({"prompt": chat[:1]})
    n_appended = 0
    n = 1
    while n < len(chat):
        number = sum(message["role"] == "assistant" for message in chat[: n + 1])
        ids = template.turn_ids(chat[n], trajectory.engine_ids, number)
        trajectory.add_given(ids)
        trajectory.stop_id = ids[-1]
        trajectory.messages.append(chat[n])
        n += 1
        new = []
        while n < len(chat) and chat[n]["role"] != "assistant":
            new.append(chat[n])
            n += 1
        assert loop.append(trajectory, new, None, template.stops)
        n_appended += "forks" not in trajectory.metrics
        texts = [template.tokenizer.decode(trajectory.engine_ids)]
        texts.append(template.text(chat[:n], None, True))
        fed, whole = (re.sub(r"<think>\s*</think>(\n\n)?", "", text) for text in texts)
        assert fed == whole
    assert n_appended or name in ("gpt-oss", "qwen3", "glm4")


@pytest.mark.parametrize("name", [*FAMILIES, *KINDS])
def test_a_suffix_of_the_recent_part_is_that_of_the_whole_chat(name, tokenizer):
    template = template_of(name, tokenizer)
    assert template.looks_far_back == (name == "numbers messages")
    whole = copy.copy(template)
    whole.looks_far_back = True
    for seed in range(3):
        chat = random_chat(template, seed, 25)
        recent = templates.Recent()
        starts = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        for start, end in zip(starts, [*starts[1:], len(chat)]):
            history, new = chat[: start + 1], chat[start + 1 : end]
            expected = suffix_or_fork(whole, history, new)
            assert suffix_or_fork(template, history, new, None, recent) == expected


def suffix_or_fork(template, history, new, *more):
    stop = template.call_end if history[-1].get("tool_calls") else template.answer_end
    try:
        return template.suffix(history, new, stop, *more)
    except RewritesHistory:
        return "fork"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ends_of_turns(name, tokenizer, tmp_path):
    """Known without a generation_config.json; they are stop tokens, besides the EOS."""
    of = FAMILIES[name]
    other = chat_templates.tokenizer_for(name, tokenizer)
    template = chat_template(other)
    ends = [other.decode([template.answer_end]), other.decode([template.call_end])]
    assert ends == [of.answer_end, of.call_end if template.shows_calls else of.answer_end]
    args = SimpleNamespace(model=str(tmp_path), chat_template_args="{}")
    ids = stop_token_ids(args, other)
    assert {other.decode([token]) for token in ids} == {of.eos, *ends}


def test_an_end_that_is_written_between_turns_only(tokenizer):
    """Apriel 1.6: the last turn has no end of its own."""
    said = "m.content + ('' if loop.last else '<|im_end|>')"
    body = BODY.replace("SAID + '<|im_end|>\n'", said)
    other = with_template(tokenizer, CHAT.replace(BODY, body) + PROMPTS)
    template = chat_template(other)
    turn = {"role": "assistant", "content": "2"}
    ids = template.suffix([*PROMPT, turn], PROMPT, other.eos_token_id)
    assert other.decode(ids) == f"<|im_start|>user\nWhat is 1+1?{ASSISTANT}"


def test_a_text_that_a_prompt_alone_brings_is_no_rewritten_history(tokenizer):
    """Muse Glimmer's system message."""
    chat = CHAT.replace("SAID", "m.content") + PROMPTS
    brief = "{{- 'Be brief.' if add_generation_prompt }}"
    given = [*PROMPT, {"role": "assistant", "content": "2"}], PROMPT, tokenizer.eos_token_id
    plain, other = (with_template(tokenizer, text) for text in (chat, brief + chat))
    assert chat_template(other).suffix(*given) == chat_template(plain).suffix(*given)


def test_an_answer_that_is_closed_before_its_end(tokenizer):
    """Kimi K3 and Cohere: what closes it is no end of a turn, and no part of the answer."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken("<|close|>", special=True, normalized=False)])
    said = "m.content + ('<|close|>' if m.role == 'assistant' else '')"
    other.chat_template = CHAT.replace("SAID", f"({said})") + PROMPTS
    template = chat_template(other)
    assert template.stops == {other.eos_token_id}
    assert template.read("2<|close|>", opened=False) == (None, "2")


def test_a_call_that_a_stop_string_ended(tokenizer):
    """The policy wrote what ends a call. So the suffix begins with the stop token, or forks."""
    calls, result = A_CALL
    given = [*PROMPT, calls], [result], None
    ids = template_of("newline after calls", tokenizer).suffix(*given)
    assert tokenizer.decode(ids) == f"{END}\n<|im_start|>tool\n3{END}\n{ASSISTANT}"
    with pytest.raises(RewritesHistory):
        template_of("ids of earlier calls", tokenizer).suffix(*given)


def test_a_stop_token_of_a_later_message_ends_no_turn(tokenizer):
    """GLM's answer ended with <|user|>, but a tool's message comes before the user's."""
    template = template_of("glm4", tokenizer)
    turn = {"role": "assistant", "content": "2"}
    with pytest.raises(RewritesHistory):
        template.suffix([*PROMPT, turn], [A_CALL[1], ADDS], template.answer_end)


def test_a_tools_block_that_vanishes_forks_with_the_next_question_alone(tokenizer):
    """As Mistral's, which writes tools before the last question."""
    template = template_of("mistral0.3", tokenizer)
    schema = [agent_loop.as_tool(calculator.calculator).schema]
    turn = {"role": "assistant", "content": "2"}
    with pytest.raises(RewritesHistory):
        template.suffix([*PROMPT, turn], [ADDS], template.answer_end, schema)
    calls, result = A_CALL
    ids = template.suffix([*PROMPT, calls], [result], template.call_end, schema)
    assert template.tokenizer.decode(ids).startswith("[TOOL_RESULTS]")


def test_channels_are_read_and_written(tokenizer):
    """gpt-oss: what is sampled in channels becomes reasoning and content, also in a fork."""
    other = chat_templates.tokenizer_for("gpt-oss", tokenizer)
    stops = chat_templates.stop_ids("gpt-oss", other)
    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    asks = "<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>"
    lines = [
        (thought + asks + '{"expression": "5*5"}<|call|>', "stop"),
        (thought + "<|channel|>final<|message|>It is 25.<|return|>", "stop"),
        ("<|channel|>final<|message|>Yes.<|return|>", "stop"),
    ]
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER), calculator.calculator)
    outputs, engine = play(other, task, quiz_row(), stops, *lines, max_response_tokens=4000)
    messages = outputs[-1].messages
    turns = [message for message in messages if message["role"] == "assistant"]
    said = [(turn.get("reasoning_content"), turn["content"]) for turn in turns]
    assert said == [("I add.", ""), ("I add.", "It is 25."), (None, "Yes.")]
    assert messages[2]["content"] == "25"
    forked = other.decode(engine.prompts[2])  # the template drops thoughts behind an answer
    assert "analysis" not in forked.partition("# Valid channels")[2].partition("<|end|>")[2]
    assert "<|channel|>final<|message|>It is 25.<|end|>" in forked


# name: (a turn of the policy, what it is answered)
ANSWERED = {
    "malformed": ("<tool_call>{broken", "not complete and well-formed"),
    "text before a call": ("I add. " + call(expression="5*5"), "25"),
    "reasoning before a call": ("<think>I add.</think>" + call(expression="5*5"), "25"),
    "a tool that is unknown": (call('a "b" <|im_end|>'), "there is no tool"),
}


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral0.3", "gpt-oss", "glm4"])
@pytest.mark.parametrize("turn, reply", ANSWERED.values(), ids=ANSWERED)
def test_each_turn_is_answered(name, turn, reply, tokenizer):
    """Mistral's template requires an id of every tool message, and drops the text beside a call."""
    of = FAMILIES[name]
    other = chat_templates.tokenizer_for(name, tokenizer)
    stops = chat_templates.stop_ids(name, other)
    lines = (turn + of.call_end, "stop"), (ANSWER + of.answer_end, "stop")
    flags = {"max_response_tokens": 4000, "tool_parser": "hermes"}
    outputs, engine = play(other, CALCULATOR, {}, stops, *lines, **flags)
    assert reply in other.decode(engine.prompts[1])[-500:]
    assert outputs[-1].metrics.get("tool_errors", 0) == (reply != "25")
    assert outputs[-1].stop_reason == "stop"


def test_a_turn_of_a_demonstration_begins_as_behind_a_prompt(tokenizer):
    """Llama 2's tokenizer puts a space before each text behind a special token."""
    chat = CHAT.replace(BODY, "{{- '[' + m.role[0] + ']' + m.content + '<|im_end|>' }}")
    other = with_template(tokenizer, chat + "{{- '[a]' if add_generation_prompt }}")
    other.backend_tokenizer.normalizer = normalizers.Prepend("_")
    ids = chat_template(other).turn_ids({"role": "assistant", "content": "hello"})
    assert other.decode(ids) == "hello<|im_end|>"


HM = {"reasoning_content": "hm"}
ADD = {"content": "", "tool_calls": called(("add", {"a": 1}))}
OPENED = {
    "closed at once": ("<think>\n", {"content": "2"}, "</think>\n\n2"),
    "a thought": ("<think>\n", HM | {"content": "2"}, "hm</think>\n\n2"),
    "a thought without a prompt's": ("", HM | {"content": "2"}, "<think>hm</think>2"),
    "a call": ("<think>\n", ADD, f"</think>\n\n{ADD['tool_calls']}"),
}


@pytest.mark.parametrize("opened, turn, spoken", OPENED.values(), ids=OPENED)
def test_a_turn_of_a_demonstration_ends_the_thought_of_its_prompt(opened, turn, spoken, tokenizer):
    """The template shows calls, and drops thoughts."""
    prompts = PROMPTS + "{{- '" + opened + "' if add_generation_prompt }}"
    said = "((m.tool_calls or '') | string + m.content.split('</think>')[-1])"
    other = with_template(tokenizer, CHAT.replace("SAID", said) + prompts)
    ids = chat_template(other).turn_ids({"role": "assistant"} | turn)
    assert other.decode(ids) == f"{spoken}<|im_end|>"


def test_a_fork_without_room_for_a_reply_ends_the_rollout(qwen3):
    words = "<think>long</think>" + ANSWER
    spent = {"max_response_tokens": len(encode(qwen3, words + END))}  # sampled before the fork
    question = "And again? " * 30
    history = [*PROMPT, {"role": "assistant", "content": ANSWER}]
    needed = len(render(qwen3, [*history, {"role": "user", "content": question}]))
    full, enough = {"max_model_len": needed}, {"max_model_len": needed + 1}
    for flags, n in ((spent, 1), (full, 1), (enough, 2)):
        task = quiz_task(Quiz((False, question, 0.0, {}), ONE_ANSWER))
        outputs, engine = play(qwen3, task, quiz_row(), [], words, ("x", "stop"), **flags)
        assert len(outputs) == len(engine.prompts) == n
        assert outputs[-1].stop_reason == ("length" if n == 1 else "stop")


# ---------------------------------------------------------------- reasoning

OFF = '{"enable_thinking": false}'
EMPTY = "<think>\n\n</think>\n\n"
TOLD = f"<|im_start|>user\n<tool_response>\n2\n</tool_response>{END}\n"


def test_reasoning_stays_while_tools_are_called_and_goes_with_the_next_question(qwen3):
    """A call inside the block is not made; the one after it is. The second question forks."""
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER), calculator.calculator)
    first = f"<think>\nperhaps {SUM}\n</think>\n\n{SUM}"
    second = f"<think>\nit is 2\n</think>\n\n{ANSWER}"
    outputs, engine = play(qwen3, task, quiz_row(), [], first, second, "It is 2")
    start, called_prompt, asked_prompt = map(qwen3.decode, engine.prompts)
    assert called_prompt == f"{start}{first}{END}\n{TOLD}{ASSISTANT}"
    again = f"<|im_start|>user\nAnd again?{END}\n{ASSISTANT}"
    assert asked_prompt == f"{start}{SUM}{END}\n{TOLD}{ASSISTANT}{ANSWER}{END}\n{again}"
    assert [output.prompt_ids + output.response_ids for output in outputs] == [
        engine.prompts[1] + encode(qwen3, second + END),
        engine.prompts[2] + encode(qwen3, "It is 2" + END),
    ]
    assert (outputs[-1].metrics["tool_calls"], outputs[-1].metrics["forks"]) == (1, 1)
    assert outputs[0].metrics == {}
    paid = [[reward for _, reward in output.turn_rewards] for output in outputs]
    assert paid == [[0.25], [0.5]]  # by the user
    _, calling, _, answering, _, last = outputs[-1].messages
    assert (calling["content"], calling["reasoning_content"]) == ("", f"\nperhaps {SUM}\n")
    assert calling["tool_calls"] == called(("calculator", {"expression": "1+1"}))
    assert (answering["content"], answering["reasoning_content"]) == (ANSWER, "\nit is 2\n")
    assert last == {"role": "assistant", "content": "It is 2"}


def test_reasoning_is_turned_off_in_every_rendering(qwen3):
    """Qwen3 takes the empty block out of a turn that is not the last. That is no fork."""
    (output,), engine = play(qwen3, CALCULATOR, {}, [], SUM, ANSWER, chat_template_args=OFF)
    start, second = map(qwen3.decode, engine.prompts)
    assert start.endswith(ASSISTANT + EMPTY)
    assert second == f"{start}{SUM}{END}\n{TOLD}{ASSISTANT}{EMPTY}"
    assert output.messages[-1] == {"role": "assistant", "content": ANSWER}


@pytest.mark.parametrize("said, reasoning, content", [
    (SUM, SUM, ""),  # the prompt has opened it, and it is never closed
    (f"hm</think>{SUM}", "hm", SUM),  # the template shows no calls, so they stay in the text
    (f"hm</think>now <think>{SUM}", f"hm{SUM}", "now "),  # opened again
])  # fmt: skip
def test_a_block_that_the_prompt_opened(said, reasoning, content, tokenizer):
    opened = "{{- '<think>\n' if add_generation_prompt }}"
    shown = CHAT.replace("SAID", "m.content.split('</think>')[-1]")
    other = with_template(tokenizer, shown + PROMPTS + opened)
    n_calls = int(content == SUM)
    lines = [said, f"</think>{ANSWER}"][: 1 + n_calls]
    outputs, engine = play(other, CALCULATOR, {}, [], *lines)
    output = outputs[-1]
    assert len(outputs) == len(lines)  # the template leaves out what was thought: a fork
    assert other.decode(engine.prompts[0]).endswith("<think>\n")
    message = output.messages[1]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert output.metrics["tool_calls"] == n_calls
    assert "tool_calls" not in message
    if n_calls:
        assert output.messages[-1]["content"] == ANSWER
        assert output.messages[-1]["reasoning_content"] == ""


def test_other_tags_also_where_they_are_special_tokens(tokenizer):
    other = copy.deepcopy(tokenizer)
    tags = [AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]")]
    other.add_tokens(tags)
    said = f"[THINK]{SUM}[/THINK]{ANSWER}"
    thought = {"role": "assistant", "content": ANSWER, "reasoning_content": SUM}
    row = {"prompt": [*PROMPT, thought, *PROMPT]}
    (output,), engine = play(other, CALCULATOR, row, [], said, think_tags="[THINK] [/THINK]")
    assert said in other.decode(engine.prompts[0])
    assert output.messages[3:] == [thought]
    assert output.metrics["tool_calls"] == 0


# ---------------------------------------------------------------- what is refused or said before

ADDS = {"role": "user", "content": "1+2?"}
# name: (what the template says of a message, the prompt, the words of the refusal)
REFUSED = {
    "calls of a prompt": ("m.content", [ADDS, *A_CALL, ADDS], "role 'assistant' says"),
    "an answer to continue": ("m.content", [ADDS, {"role": "assistant", "content": "3"}],
                              "ends the assistant's last message"),
    "an unknown role": ("m.content", [{"role": "judge", "content": "Hm."}, ADDS], "role 'judge'"),
    "answers of tools": ("(m.content if m.role in ['user', 'assistant'] else '')",
                         [ADDS], "does not take a tool's answer: it leaves out"),
}  # fmt: skip


@pytest.mark.parametrize("said, prompt, words", REFUSED.values(), ids=REFUSED)
def test_a_template_that_hides_a_message_is_refused(said, prompt, words, tokenizer):
    other = with_template(tokenizer, CHAT.replace("SAID", said) + PROMPTS)
    with pytest.raises(BadInput, match=words):
        check_tokenizer(other, other, {"prompt": prompt}, CALCULATOR, agent_loop.LoopArgs())


# name: (what the template says of a message, the words of the warning)
SYSTEM_AGAIN = "m.content + (messages[0].content if m.role == 'user' and loop.last else '')"
WARNED = {
    "a system prompt again": (SYSTEM_AGAIN, "writes a message of role 'system' again"),
    "the time beside tools": ("m.content + (strftime_now('%Y') if tools else '')", "today's date"),
    "tools that are ignored": ("m.content + m.tool_calls | string", "ignores tools"),
    "thoughts": ("m.content.split('</think>')[-1] + m.tool_calls | string", ""),
}


@pytest.mark.parametrize("said, warned", WARNED.values(), ids=WARNED)
def test_what_a_template_does_to_a_task_is_named(said, warned, tokenizer):
    listed = "" if "ignores" in warned else "{{- tools | string }}"
    other = with_template(tokenizer, listed + CHAT.replace("SAID", f"({said})") + PROMPTS)
    prompt = [{"role": "system", "content": "Add."}, *PROMPT]
    schemas = [agent_loop.as_tool(calculator.calculator).schema]
    found = chat_template(other).check(prompt, schemas, has_user=True)
    assert any(warned in each for each in found) if warned else found == []
