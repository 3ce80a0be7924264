"""Models that reason before they answer: templates in Qwen3's and DeepSeek's form, tags of other names, on and off.

What the engine saw and said is checked token by token; a tool call inside a reasoning block is reasoning.
"""

# ruff: noqa: E501  a line of a template is a line

import asyncio
import copy
import json

import pytest
from test_agent_loop import ANSWER, END, PROMPT, SUM, Quiz, Script, called, encode, quiz_row, quiz_task, task_of
from test_templates import play
from tokenizers import AddedToken

from agent_loop import BadInput, render
from data import filter_overlong
from examples import calculator
from examples.chat_client import ChatAgentLoop
from train import Args, check_args, parse_args

# Qwen3's: reasoning stays in what follows the last question of a user; an empty block where thinking is turned off.
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
# DeepSeek's: the prompt opens the block, and what was thought before is cut out of the content.
DEEPSEEK = r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""
OFF = '{"enable_thinking": false}'
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def thinker(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = QWEN3.strip()
    return other


def whole(output) -> list[int]:
    return output.prompt_ids + output.response_ids


def test_reasoning_stays_while_tools_are_called_and_goes_with_the_next_question(thinker):
    """A call inside the block is not made; the one behind it is. Two questions: the second forks."""
    quiz = Quiz((False, "And again?", 0.25, {}), (True, "", 0.5, {}))
    first, second = f"<think>\nperhaps {SUM}\n</think>\n\n{SUM}", f"<think>\nit is 2\n</think>\n\n{ANSWER}"
    lines = [first, second, "It is 2"]
    outputs, engine = play(thinker, quiz_task(quiz, calculator.calculator), quiz_row(), [thinker.eos_token_id], *lines)
    start = encode(thinker, "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    tool = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert engine.prompts[0] == start
    assert engine.prompts[1] == start + encode(thinker, first + END) + encode(thinker, tool)
    again = ("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n" + f"\n{SUM}"
             + "<|im_end|>" + tool + ANSWER + "<|im_end|>\n<|im_start|>user\nAnd again?<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip
    assert thinker.decode(engine.prompts[2]) == again and engine.prompts[2] == encode(thinker, again)
    assert [whole(o) for o in outputs] == [
        engine.prompts[1] + encode(thinker, second + END),
        engine.prompts[2] + encode(thinker, "It is 2" + END),
    ]
    assert outputs[-1].metrics["tool_calls"] == 1 and outputs[-1].metrics["forks"] == 1
    _, calling, _, answering, _, last = outputs[-1].messages
    made = called(("calculator", {"expression": "1+1"}))
    assert calling == {
        "role": "assistant",
        "content": "\n\n",
        "reasoning_content": f"\nperhaps {SUM}\n",
        "tool_calls": made,
    }
    assert answering == {"role": "assistant", "content": f"\n\n{ANSWER}", "reasoning_content": "\nit is 2\n"}
    assert last == {"role": "assistant", "content": "It is 2"}


def test_turned_off_in_every_rendering(thinker):
    """Qwen3 takes the empty block out of a turn that is not the last: the history is rewritten, by its template."""
    task = quiz_task(Quiz((True, "", 0.0, {})), calculator.calculator)
    stops = [thinker.eos_token_id]
    outputs, engine = play(thinker, task, quiz_row(), stops, SUM, ANSWER, chat_template_args=OFF)
    start = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    called_once = f"{start}\n{SUM}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert [thinker.decode(prompt) for prompt in engine.prompts] == [
        start + EMPTY, called_once + "<|im_start|>assistant\n" + EMPTY]  # fmt: skip
    assert len(outputs) == 2 and "reasoning_content" not in outputs[1].messages[-1]
    assert outputs[1].messages[-1]["content"] == ANSWER

    # the length of prompts is that of what is sent
    args = Args(max_prompt_tokens=len(engine.prompts[0]), chat_template_args=OFF)
    rows = [{"prompt": PROMPT}]
    assert filter_overlong(rows, thinker, task_of(), args) == rows
    args.max_prompt_tokens -= 1
    with pytest.raises(BadInput, match="no prompt left"):
        filter_overlong(rows, thinker, task_of(), args)


@pytest.mark.parametrize(("said", "reasoning", "content", "calls"), [
    (f"{SUM}", f"{SUM}", "", 0),  # the prompt has opened it, and it is never closed
    (f"hm</think>{SUM}", "hm", "", 1),
    (f"hm</think>now <think>{SUM}", f"hm{SUM}", "now ", 0),  # opened again
    (f"a</think>b<think>c</think>{SUM}", "a</think>b<think>c", "", 1),  # the last one counts
])  # fmt: skip
def test_a_block_that_the_prompt_opened(said, reasoning, content, calls, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = DEEPSEEK.strip()
    task = task_of(calculator.calculator)
    lines = [said, f"</think>{ANSWER}"][: 1 + calls]
    (output,), engine = play(other, task, {}, [other.eos_token_id], *lines)
    assert engine.prompts[0][-8:] == encode(other, "<think>\n")
    message = output.messages[1]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert ("tool_calls" in message) == bool(calls) and output.metrics.get("tool_calls", 0) == calls
    if calls:
        assert output.messages[-1]["content"] == ANSWER and output.messages[-1]["reasoning_content"] == ""
        assert engine.prompts[1][-8:] == encode(other, "<think>\n")
    assert 0 not in output.response_mask if not calls else 0 in output.response_mask


def test_other_tags_also_where_they_are_special_tokens(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]")])
    said = f"[THINK]{SUM}[/THINK]{ANSWER}"
    task = task_of(calculator.calculator)
    (output,), _ = play(other, task, {}, [other.eos_token_id], said, think_tags="[THINK] [/THINK]")
    assert output.messages[1:] == [{"role": "assistant", "content": ANSWER, "reasoning_content": SUM}]
    assert output.metrics.get("tool_calls", 0) == 0
    (output,), _ = play(other, task, {}, [other.eos_token_id], said, ANSWER)  # to the default tags this is no block
    assert output.metrics["tool_calls"] == 1
    for tags in ("<think>", "<a> <a>", "a b a"):
        with pytest.raises(BadInput, match=f"--think_tags {tags} must be two different tags"):
            check_args(parse_args(["--think_tags", tags]))
    with pytest.raises(BadInput, match="--chat_template_args is not JSON"):
        check_args(parse_args(["--chat_template_args", "off"]))


def test_a_chat_agent_may_override_it_in_a_request(thinker):
    """And gets the reasoning; a history in another mode is a token sequence of its own."""
    lines = (f"<think>\nhm {SUM}\n</think>\n\nYes", "No", "Sure", "Well")
    engine, seen = Script(thinker, lines), []

    class Agent(ChatAgentLoop):
        async def chat(self, client, **row):
            async def ask(messages, **how):
                completion = await client.chat.completions.create(messages=messages, tools=[{}], **how)
                seen.append(completion.choices[0].message)
                return json.loads(completion.model_dump_json())["choices"][0]["message"]

            await ask(PROMPT)
            off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            answer = await ask(PROMPT, **off)
            more = [*PROMPT, answer, {"role": "user", "content": "Sure?"}]
            await ask(more, chat_template_kwargs={"enable_thinking": False})
            await ask(more)

    loop = Agent(engine, thinker, None, task_of(), Args(max_response_tokens=1000))
    row = {"prompt": PROMPT, "step": 0, "index": 0, "rollout_n": 0, "validate": False}
    asyncio.run(loop.run({"stop_token_ids": [thinker.eos_token_id]}, **row))
    assert seen[0].reasoning_content == f"\nhm {SUM}\n" and seen[0].content == "\n\nYes" and not seen[0].tool_calls
    assert not hasattr(seen[1], "reasoning_content")
    start = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    asked = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert [thinker.decode(prompt) for prompt in engine.prompts] == [
        start, start + EMPTY, f"{start}No{asked}{EMPTY}", f"{start}No{asked}"]  # fmt: skip
    # reasoning that a client sends with a history is rendered
    history = [*PROMPT, {"role": "assistant", "content": "2", "reasoning_content": "sum"}]
    assert "<think>\nsum\n</think>\n\n2" in thinker.decode(render(thinker, history))
