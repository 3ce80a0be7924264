"""Models that reason before they answer: templates in Qwen3's and DeepSeek's form, other tags.

A tool call inside a reasoning block is reasoning.
"""

# ruff: noqa: E501  a line of a template is a line

import asyncio
import copy

import pytest
from test_agent_loop import (
    ANSWER,
    ASKED,
    ASSISTANT,
    CALCULATOR,
    END,
    PROMPT,
    ROW,
    SUM,
    Quiz,
    Script,
    called,
    encode,
    quiz_row,
    quiz_task,
    task_of,
)
from test_templates import AGAIN, ONE_ANSWER, play, with_template
from tokenizers import AddedToken

from agent_loop import BadInput, render
from data import filter_overlong
from examples import calculator
from flatrl.chat.client import ChatAgentLoop
from train import Args, check_args, parse_args

# Qwen3's: reasoning stays in what follows the last question of a user; an empty block where it is
# turned off.
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
TOOL = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"


@pytest.fixture
def thinker(tokenizer):
    return with_template(tokenizer, QWEN3.strip())


def test_reasoning_stays_while_tools_are_called_and_goes_with_the_next_question(thinker):
    """A call inside the block is not made; the one after it is. The second question forks."""
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER), calculator.calculator)
    first = f"<think>\nperhaps {SUM}\n</think>\n\n{SUM}"
    second = f"<think>\nit is 2\n</think>\n\n{ANSWER}"
    stops = [thinker.eos_token_id]
    outputs, engine = play(thinker, task, quiz_row(), stops, first, second, "It is 2")
    again = f"<|im_start|>user\nAnd again?{END}\n{ASSISTANT}"
    prompts = [
        ASKED,
        f"{ASKED}{first}{END}\n{TOOL}{ASSISTANT}",
        f"{ASKED}\n{SUM}{END}\n{TOOL}{ASSISTANT}{ANSWER}{END}\n{again}",
    ]
    assert engine.prompts == [encode(thinker, prompt) for prompt in prompts]
    assert [output.prompt_ids + output.response_ids for output in outputs] == [
        engine.prompts[1] + encode(thinker, second + END),
        engine.prompts[2] + encode(thinker, "It is 2" + END),
    ]
    assert outputs[-1].metrics["tool_calls"] == 1
    assert outputs[-1].metrics["forks"] == 1
    _, calling, _, answering, _, last = outputs[-1].messages
    assert calling == {
        "role": "assistant",
        "content": "\n\n",
        "reasoning_content": f"\nperhaps {SUM}\n",
        "tool_calls": called(("calculator", {"expression": "1+1"})),
    }
    assert answering["content"] == f"\n\n{ANSWER}"
    assert answering["reasoning_content"] == "\nit is 2\n"
    assert last == {"role": "assistant", "content": "It is 2"}


def test_turned_off_in_every_rendering(thinker):
    """Qwen3 takes the empty block out of a turn that is not the last. That is no fork."""
    stops = [thinker.eos_token_id]
    (output,), engine = play(thinker, CALCULATOR, {}, stops, SUM, ANSWER, chat_template_args=OFF)
    first = ASKED + EMPTY
    prompts = [first, f"{first}{SUM}{END}\n{TOOL}{ASSISTANT}{EMPTY}"]
    assert [thinker.decode(prompt) for prompt in engine.prompts] == prompts
    assert output.messages[-1] == {"role": "assistant", "content": ANSWER}

    # The length of a prompt is that of what is sent.
    args = Args(max_prompt_tokens=len(engine.prompts[0]), chat_template_args=OFF)
    rows = [{"prompt": PROMPT}]
    assert filter_overlong(rows, thinker, task_of(), args) == rows
    args.max_prompt_tokens -= 1
    with pytest.raises(BadInput, match="no prompt left"):
        filter_overlong(rows, thinker, task_of(), args)


@pytest.mark.parametrize("said, reasoning, content, calls", [
    (f"{SUM}", f"{SUM}", "", 0),  # the prompt has opened it, and it is never closed
    (f"hm</think>{SUM}", "hm", SUM, 1),  # the template shows no calls, so they stay in the text
    (f"hm</think>now <think>{SUM}", f"hm{SUM}", "now ", 0),  # opened again
    (f"a</think>b<think>c</think>{SUM}", "a</think>b<think>c", SUM, 1),  # the last one counts
])  # fmt: skip
def test_a_block_that_the_prompt_opened(said, reasoning, content, calls, tokenizer):
    other = with_template(tokenizer, DEEPSEEK.strip())
    lines = [said, f"</think>{ANSWER}"][: 1 + calls]
    outputs, engine = play(other, CALCULATOR, {}, [], *lines)
    output = outputs[-1]
    assert len(outputs) == len(lines)  # the template leaves out what was thought: a fork
    for prompt in engine.prompts:
        assert prompt[-8:] == encode(other, "<think>\n")
    message = output.messages[1]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert output.metrics["tool_calls"] == calls
    assert "tool_calls" not in message
    if calls:
        assert output.messages[-1]["content"] == ANSWER
        assert output.messages[-1]["reasoning_content"] == ""


def test_other_tags_also_where_they_are_special_tokens(tokenizer):
    other = copy.deepcopy(tokenizer)
    tags = [AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]")]
    other.add_tokens(tags)
    said = f"[THINK]{SUM}[/THINK]{ANSWER}"
    (output,), _ = play(other, CALCULATOR, {}, [], said, think_tags="[THINK] [/THINK]")
    thought = {"role": "assistant", "content": ANSWER, "reasoning_content": SUM}
    assert output.messages[1:] == [thought]
    assert output.metrics["tool_calls"] == 0
    (output,), _ = play(other, CALCULATOR, {}, [], said, ANSWER)  # no block of the default tags
    assert output.metrics["tool_calls"] == 1
    with pytest.raises(BadInput, match="think_tags <think> must be two different tags"):
        check_args(parse_args(["--agent_args", '{"think_tags": "<think>"}']))


def test_a_chat_agent_may_override_it_in_a_request(thinker):
    """And gets the reasoning; a history in another mode is a token sequence of its own."""
    lines = [f"<think>\nhm {SUM}\n</think>\n\nYes", "No", "Sure", "Well"]
    engine = Script(thinker, lines)
    seen = []
    off = {"chat_template_kwargs": {"enable_thinking": False}}

    class Agent(ChatAgentLoop):
        async def chat(self, client, **row):
            more = [*PROMPT, {"role": "assistant", "content": "No"}, *PROMPT]
            for messages, how in (
                (PROMPT, {}),
                (PROMPT, {"extra_body": off}),
                (more, off),
                (more, {}),
            ):
                create = client.chat.completions.create
                completion = await create(messages=messages, tools=[{}], **how)
                seen.append(completion.choices[0].message)

    loop = Agent(engine, thinker, None, task_of(), Args(max_response_tokens=1000))
    asyncio.run(loop.run({}, **ROW))
    assert (seen[0].reasoning_content, seen[0].content) == (f"\nhm {SUM}\n", "\n\nYes")
    assert not seen[0].tool_calls
    assert not hasattr(seen[1], "reasoning_content")
    more = f"{ASKED}No{END}\n{ASKED}"
    off = f"{ASKED}{EMPTY}No{END}\n{ASKED}{EMPTY}"
    prompts = [ASKED, ASKED + EMPTY, off, more]
    assert [thinker.decode(prompt) for prompt in engine.prompts] == prompts
    # Reasoning that a client sends with a history is rendered.
    history = [*PROMPT, {"role": "assistant", "content": "2", "reasoning_content": "sum"}]
    assert "<think>\nsum\n</think>\n\n2" in thinker.decode(render(thinker, history))
