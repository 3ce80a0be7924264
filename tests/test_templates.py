"""Turns under chat templates like those of Qwen3, Llama-3.1, Mistral and gpt-oss.

Where a template only appends, a rollout is one token sequence. Where it rewrites the history, the
rollout forks: Qwen3 drops earlier reasoning, Mistral moves the tools to the last user message, and
gpt-oss closes an old answer with another token.
"""

# ruff: noqa: E501  a line of a template is a line

import asyncio
import copy

import pytest
from conftest import HANGS, too_late
from test_agent_loop import (
    ANSWER,
    CALCULATOR,
    PROMPT,
    Quiz,
    Script,
    call,
    called,
    encode,
    loop_of,
    quiz_row,
    quiz_task,
)
from tokenizers import AddedToken

from agent_loop import Demonstration, LoopArgs, SingleTurnLoop, as_tool, render, turn_suffix
from examples import calculator

# Reasoning stays in what follows the last question of a user; an empty block where it is turned off.
QWEN3 = r"""
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- m.content.lstrip('\n') }}
        {%- for c in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# No newline after a turn, contents trimmed, one tool call a message, results from "ipython".
LLAMA31 = r"""
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' + (m.tool_calls[0].function | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# No generation prompt; ids of calls have nine characters and are shown; the tools stand before the LAST user message.
MISTRAL = r"""
{{- '<s>' }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS]' + (tools | length | string) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS]' }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
            {{- c.function.name + (c.function.arguments | tojson) + c.id }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
        {{- '[TOOL_RESULTS]' + m.content + m.tool_call_id + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

# Calls end with <|call|>, the last answer with <|return|>, an earlier one with <|end|>.
GPT_OSS = r"""
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + m.name + ' to=assistant<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# template, its special tokens, the token that ends a call and the one that ends an answer, how
# often `test_tool_turns_and_user_turns` forks
FAMILIES = {
    "qwen3": (QWEN3, "", "<|im_end|>", "<|im_end|>", 1),
    "llama3.1": (
        LLAMA31,
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|eot_id|>",
        "<|eot_id|>",
        0,
    ),
    "mistral": (
        MISTRAL,
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "</s>",
        "</s>",
        1,
    ),
    "gpt-oss": (
        GPT_OSS,
        "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
        "<|call|>",
        "<|return|>",
        2,
    ),
}
ONE_ANSWER = (True, "", 0.5, {})
AGAIN = (False, "And again?", 0.25, {})


@pytest.fixture(params=list(FAMILIES))
def family(request, tokenizer):
    template, special, call_end, answer_end, forks = FAMILIES[request.param]
    other = with_template(tokenizer, template.strip())
    other.add_tokens([AddedToken(x, special=True, normalized=False) for x in special.split()])
    other.eos_token = answer_end
    return other, call_end, answer_end, forks


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


@pytest.fixture
def qwen3(tokenizer):
    return with_template(tokenizer, QWEN3.strip())


def as_list(outputs) -> list:
    return outputs if isinstance(outputs, list) else [outputs]


def play(tokenizer, task, row, stop_ids, *lines, **flags):
    """Runs a rollout; returns its outputs and the scripted engine."""
    engine = Script(tokenizer, lines)
    flags = {"tool_timeout": HANGS} | flags
    run = loop_of(engine, task, row, {"stop_token_ids": stop_ids}, **flags)
    return as_list(asyncio.run(run)), engine


def sampled_turns(output) -> list[tuple[list[int], list[int]]]:
    """Returns for each sampled turn the tokens before it, and its own."""
    turns = []
    ids = list(output.prompt_ids)
    was_sampled = 0
    for token, is_sampled in zip(output.response_ids, output.response_mask):
        if is_sampled and not was_sampled:
            turns.append((list(ids), []))
        if is_sampled:
            turns[-1][1].append(token)
        ids.append(token)
        was_sampled = is_sampled
    return turns


def test_tool_turns_and_user_turns(family):
    other, call_end, answer_end, forks = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER), calculator.calculator)
    said = [
        "<think>sum</think>\n" + call(expression="1+1") + call_end,
        "<think>easy</think>\n" + ANSWER + answer_end,
        "It is 2" + answer_end,
    ]
    lines = [(words, "stop") for words in said]
    outputs, engine = play(other, task, quiz_row(), stops, *lines)

    # Every sampled token is in exactly one output, verbatim and in order. Each turn continues
    # what the engine saw and said before in its own output.
    turns = [turn for output in outputs for turn in sampled_turns(output)]
    assert [before for before, _ in turns] == engine.prompts
    assert [sampled for _, sampled in turns] == [encode(other, words) for words in said]

    # Between the turns stands what the template puts there.
    whole = render(other, outputs[-1].messages[:-1], [as_tool(calculator.calculator).schema])
    rewards = [[reward for _, reward in output.turn_rewards] for output in outputs]
    if forks:
        *_, first, second = outputs
        assert len(outputs) == 1 + forks
        assert engine.prompts[2] == whole == second.prompt_ids
        assert first.messages == second.messages[: len(first.messages)]
        assert second.metrics["forks"] == forks
        assert first.metrics == {}
        assert rewards[-2:] == [[0.25], [0.5]]
    else:
        start = len(engine.prompts[1]) + len(encode(other, said[1]))
        between = other.decode(engine.prompts[2][start:])
        assert other.decode(whole).endswith(between)
        assert "And again?" in between
        assert rewards == [[0.25, 0.5]]


def test_the_suffix_is_the_templates_text_behind_the_end_of_turn(family):
    """The newline after the end-of-turn token (verl#6501), the next header, and nothing else."""
    other, call_end, _, _ = family
    stop = other.convert_tokens_to_ids(call_end)
    calls = called(("calculator", {"expression": "1+1"}))
    asked = [
        *PROMPT,
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    new = [{"role": "tool", "name": "calculator", "content": "2", "tool_call_id": "000001000"}]
    suffix = turn_suffix(other, asked, new, {stop}, ended=True, tools=[{}])
    how = dict(tools=[{}], tokenize=False)
    rendered = other.apply_chat_template(asked + new, add_generation_prompt=True, **how)
    start = rendered.index(call_end, rendered.index("1+1\"")) + len(call_end)
    assert other.decode(suffix) == rendered[start:]
    cut = turn_suffix(other, asked, new, {stop}, ended=False, tools=[{}])
    assert cut == [stop, *suffix]


def test_a_malformed_call_is_answered(family):
    """Mistral's template requires an id of every tool message."""
    other, call_end, answer_end, _ = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    lines = ("<tool_call>{broken" + call_end, "stop"), (ANSWER + answer_end, "stop")
    outputs, engine = play(other, CALCULATOR, {}, stops, *lines)
    assert "not valid JSON" in other.decode(engine.prompts[1])
    assert outputs[-1].metrics["tool_errors"] == 1
    assert outputs[-1].stop_reason == "stop"


def test_turns_of_a_demonstration_are_written_as_the_template_writes_them(family):
    other, call_end, answer_end, _ = family
    stops = {other.convert_tokens_to_ids(token) for token in (call_end, answer_end)}
    loop = SingleTurnLoop(None, other, None, None, LoopArgs())
    player = Demonstration([], loop, stops)
    calls = called(("calculator", {"expression": "1+1"}))
    before = other.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    for said, end in (
        ({"content": "", "tool_calls": calls}, call_end),
        ({"content": "It is 2."}, answer_end),
    ):
        message = {"role": "assistant", **said}
        text = other.apply_chat_template([*PROMPT, message], tokenize=False)
        assert text.startswith(before)
        ids = player.turn_ids(message)
        assert other.decode(ids) == text.removeprefix(before).rstrip("\n")
        assert ids[-1] == other.convert_tokens_to_ids(end)


@pytest.mark.parametrize("room", [0, 1, "budget"])
def test_a_fork_without_room_for_a_reply_ends_the_rollout(qwen3, room):
    question = "And again? " * 30
    history = [*PROMPT, {"role": "assistant", "content": ANSWER}]
    needed = len(render(qwen3, [*history, {"role": "user", "content": question}]))
    words = "<think>long</think>\n" + ANSWER
    if room == "budget":  # it counts what was sampled before the fork
        flags = {"max_response_tokens": len(encode(qwen3, words + "<|im_end|>"))}
    else:
        flags = {"max_model_len": needed + room}
    task = quiz_task(Quiz((False, question, 0.0, {}), ONE_ANSWER))
    outputs, engine = play(qwen3, task, quiz_row(), [], words, ("x", "stop"), **flags)
    assert len(outputs) == len(engine.prompts) == 1 + (room == 1)
    assert outputs[-1].stop_reason == ("stop" if room == 1 else "length")


def test_a_fork_in_which_nothing_was_sampled_is_left_out(qwen3):
    """Its rewards, metrics and stop reason go to the output before."""

    class Slow(Script):
        async def generate(self, **call):
            if self.prompts:
                await too_late()
            return await super().generate(**call)

    engine = Slow(qwen3, ("<think>long</think>\n" + ANSWER, "late"))
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER))
    run = loop_of(engine, task, quiz_row(), trajectory_timeout=HANGS)
    (output,) = asyncio.run(run)
    assert output.stop_reason == "timeout"
    assert output.metrics["forks"] == 1
    assert output.turn_rewards == [(len(output.response_ids) - 1, 0.25)]
    assert 0 not in output.response_mask
    assert output.messages[-1]["content"] == "\n" + ANSWER
