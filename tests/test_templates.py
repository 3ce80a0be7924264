"""Turns under chat templates that behave like those of Qwen2.5, Qwen3, Llama-3.1, Mistral and gpt-oss.

What is checked is the same for all: every prompt the engine saw is a prefix plus what it said, as one token sequence
where the template only appends, and as a fork where it rewrites what was said before (Qwen3 drops earlier reasoning,
Mistral moves the tools to the last user message, gpt-oss closes an old answer with another token).
"""

# ruff: noqa: E501  a line of a template is a line

import asyncio
import copy
import json

import pytest
from conftest import HANGS, too_late
from test_agent_loop import ANSWER, PROMPT, Quiz, Script, call, called, encode, quiz_row, quiz_task
from tokenizers import AddedToken

from agent_loop import Demonstration, ToolAgentLoop, render, turn_suffix
from examples import smollm2
from train import Args

QWEN25 = r"""
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content }}
        {%- for c in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# As Qwen2.5, but reasoning stays only in what follows the last question of a user (tool results are no question).
QWEN3 = r"""
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
""" + QWEN25.replace(
    "'<|im_start|>' + m.role + '\\n' + m.content",
    "'<|im_start|>' + m.role + '\\n' + (m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\\n'))",
)

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

# template, its special tokens, the token that ends a call and the one that ends an answer, does a user turn fork?
FAMILIES = {
    "qwen2.5": (QWEN25, [], "<|im_end|>", "<|im_end|>", False),
    "smollm2": (smollm2.CHAT_TEMPLATE, [], "<|im_end|>", "<|im_end|>", False),
    "qwen3": (QWEN3, [], "<|im_end|>", "<|im_end|>", True),
    "llama3.1": (LLAMA31, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>",
                 "<|eot_id|>", False),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                          "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "</s>", "</s>", True),
    "gpt-oss": (GPT_OSS, ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"], "<|call|>",
                "<|return|>", True),
}  # fmt: skip


@pytest.fixture(params=list(FAMILIES))
def family(request, tokenizer):
    template, special, call_end, answer_end, forks = FAMILIES[request.param]
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    other.chat_template = template.strip()
    other.eos_token = answer_end
    return other, call_end, answer_end, forks


def play(tokenizer, task, row, stop_ids, *lines, **flags):
    args = Args(**{"max_response_tokens": 1000, "tool_timeout": HANGS} | flags)
    engine = Script(tokenizer, lines)
    loop = ToolAgentLoop(engine, tokenizer, None, task, args)
    row = {"prompt": PROMPT} | row
    outputs = asyncio.run(loop.run({"stop_token_ids": stop_ids}, **row, step=0, index=0, rollout_n=0, validate=False))
    return (outputs if isinstance(outputs, list) else [outputs]), engine


def test_tool_turns_and_user_turns(family, tokenizer):
    from examples import calculator

    other, call_end, answer_end, forks = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    quiz = Quiz((False, "And again?", 0.25, {}), (True, "", 0.5, {}))
    first, second = "<think>sum</think>\n" + call(expression="1+1"), "<think>easy</think>\n" + ANSWER
    said = [first + call_end, second + answer_end, "It is 2" + answer_end]
    lines = [(words, "stop") for words in said]
    outputs, engine = play(other, quiz_task(quiz, calculator.calculator), quiz_row(), stops, *lines)
    assert len(outputs) == (2 if forks else 1)

    # Every token that was sampled is in exactly one output, verbatim and in order; each turn went on from exactly what
    # the engine had seen and said before in its own output.
    sampled = [ids for o in outputs for ids, m in zip(o.response_ids, o.response_mask, strict=True) if m]
    assert sampled == [i for words in said for i in encode(other, words)]
    turn = 0
    for output in outputs:
        ids = list(output.prompt_ids)
        for at, (token, mask) in enumerate(zip(output.response_ids, output.response_mask, strict=True)):
            if mask and (at == 0 or not output.response_mask[at - 1]):
                assert engine.prompts[turn] == ids
                turn += 1
            ids.append(token)
    assert turn == 3 == len(engine.prompts)

    # What stands between the turns is what the template puts there: decoding each prompt gives its rendering.
    tools = [calculator_schema()]
    whole = render(other, outputs[-1].messages[:-1], tools)
    if forks:
        assert engine.prompts[2] == whole == outputs[1].prompt_ids
        assert outputs[0].messages == outputs[1].messages[: len(outputs[0].messages)]
        assert outputs[1].metrics["forks"] == 1 and outputs[0].metrics == {}
        assert outputs[0].extra is not outputs[1].extra  # rollout() numbers them
        assert [reward for _, reward in outputs[0].turn_rewards] == [0.25]
        assert [reward for _, reward in outputs[1].turn_rewards] == [0.5]
    else:
        between = other.decode(engine.prompts[2][len(engine.prompts[1]) + len(encode(other, said[1])) :])
        assert other.decode(whole).endswith(between) and "And again?" in between
        assert [reward for _, reward in outputs[0].turn_rewards] == [0.25, 0.5]
    result = other.decode(engine.prompts[1][len(engine.prompts[0]) + len(encode(other, said[0])) :])
    assert "2" in result and "1+1" not in result


def calculator_schema() -> dict:
    from agent_loop import as_tool
    from examples import calculator

    return as_tool(calculator.calculator).schema


def test_the_suffix_is_the_templates_text_behind_the_end_of_turn(family):
    """The newline after the end-of-turn token (verl#6501), the next header, and nothing else."""
    other, call_end, answer_end, _ = family
    stop = other.convert_tokens_to_ids(call_end)
    made = {
        "type": "function",
        "id": "123456789",
        "function": {"name": "calculator", "arguments": {"expression": "1+1"}},
    }
    asked = [*PROMPT, {"role": "assistant", "content": "", "tool_calls": [made]}]
    new = [{"role": "tool", "name": "calculator", "content": "2", "tool_call_id": "123456789"}]
    suffix = turn_suffix(other, asked, new, {stop}, ended=True, tools=[{"type": "function"}])
    rendered = other.apply_chat_template(asked + new, tools=[{}], tokenize=False, add_generation_prompt=True)
    before = other.apply_chat_template(asked, tools=[{}], tokenize=False)
    assert other.decode(suffix) == rendered[before.rindex(call_end) + len(call_end) :]
    cut = turn_suffix(other, asked, new, {stop}, ended=False, tools=[{"type": "function"}])
    assert cut == [stop, *suffix]


def test_a_fork_that_does_not_fit_ends_the_trajectory(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = FAMILIES["qwen3"][0].strip()
    question, words = "And again? " * 30, "<think>long</think>\n" + ANSWER
    line = (words + "<|im_end|>", "stop")
    rewritten = [*PROMPT, {"role": "assistant", "content": words}, {"role": "user", "content": question}]
    needed, stops = len(render(other, rewritten)), [other.eos_token_id]
    for window, forks in ((needed + 1, True), (needed, False)):  # one token of reply has to fit
        quiz = quiz_task(Quiz((False, question, 0.0, {}), (True, "", 0.0, {})))
        outputs, engine = play(other, quiz, quiz_row(), stops, line, ("x", "stop"), max_model_len=window)
        assert len(outputs) == len(engine.prompts) == 1 + forks
        assert outputs[-1].stop_reason == ("stop" if forks else "length")
        assert all(len(output.prompt_ids) + len(output.response_ids) <= window for output in outputs)
    # the budget counts what was sampled before the fork
    budget = len(encode(other, line[0]))
    quiz = quiz_task(Quiz((False, question, 0.0, {})))
    outputs, _ = play(other, quiz, quiz_row(), stops, line, max_response_tokens=budget)
    assert len(outputs) == 1 and outputs[0].stop_reason == "length"


def test_a_malformed_call_is_answered(family):
    """Mistral's template wants an id of every tool message."""
    other, call_end, answer_end, _ = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    from examples import calculator

    task = quiz_task(Quiz((True, "", 0.0, {})), calculator.calculator)
    lines = [("<tool_call>{broken" + call_end, "stop"), (ANSWER + answer_end, "stop")]
    outputs, engine = play(other, task, quiz_row(), stops, *lines)
    assert "not valid JSON" in other.decode(engine.prompts[1])
    assert outputs[-1].metrics["tool_errors"] == 1 and outputs[-1].stop_reason == "stop"


def test_a_fork_in_which_nothing_was_sampled_leaves_what_it_has_to_the_one_before(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = FAMILIES["qwen3"][0].strip()
    quiz = quiz_task(Quiz((False, "And again?", 0.25, {}), (True, "", 0.0, {})))
    words = "<think>long</think>\n" + ANSWER

    class Slow(Script):
        async def generate(self, **call):
            if self.prompts:
                await too_late()
            return await super().generate(**call)

    args = Args(max_response_tokens=1000, trajectory_timeout=HANGS)
    loop = ToolAgentLoop(Slow(other, (words, "late")), other, None, quiz, args)
    row = {"prompt": PROMPT, **quiz_row(), "step": 0, "index": 0, "rollout_n": 0, "validate": False}
    (output,) = asyncio.run(loop.run({"stop_token_ids": [other.eos_token_id]}, **row))
    assert output.stop_reason == "timeout" and output.metrics["forks"] == 1
    assert output.turn_rewards == [(len(output.response_ids) - 1, 0.25)] and 0 not in output.response_mask
    assert output.messages[-1] == {"role": "assistant", "content": "\n" + ANSWER, "reasoning_content": "long"}


def test_messages_of_a_call_are_json_that_any_client_reads(tokenizer):
    from examples import calculator

    outputs, _ = play(tokenizer, quiz_task(Quiz((True, "", 0.0, {})), calculator.calculator), quiz_row(),
                      [tokenizer.eos_token_id], call(expression="1+1"), ANSWER)  # fmt: skip
    message = json.loads(json.dumps(outputs[0].messages))[1]
    assert message["tool_calls"][0]["id"] == "000001000"
    assert message["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "1+1"}}


def test_turns_of_a_demonstration_are_written_as_the_template_writes_them(family):
    """Qwen2.5 and 3, Llama 3.1, Mistral, gpt-oss ...: the loop's sequence is the template's rendering of the chat."""
    other, call_end, answer_end, _ = family
    stops = {other.convert_tokens_to_ids(token) for token in (call_end, answer_end)}
    loop = ToolAgentLoop(None, other, None, None, Args())
    player = Demonstration([], loop, stops)
    calls = called(("calculator", {"expression": "1+1"}))
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    for message, end in ((said, call_end), ({"role": "assistant", "content": "It is 2."}, answer_end)):
        text = other.apply_chat_template([*PROMPT, message], tokenize=False)
        before = other.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
        assert text.startswith(before)
        assert other.decode(player.turn_ids(message)) == text.removeprefix(before).rstrip("\n")
        assert player.turn_ids(message)[-1] == other.convert_tokens_to_ids(end)
