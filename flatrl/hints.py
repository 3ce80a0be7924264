"""What the policy is told when it is its own teacher (--hints, --algo opsd).

That is a row's `hint`, or the prompt that an agent loop sets as extra["told_prompt_ids"].

The teacher has the policy's weights. It scores the tokens that the policy sampled, after the
same prompt with the hint in it. Tokens that the hint makes likelier get positive advantages."""

import os
from collections.abc import Iterable
from dataclasses import replace

from agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    agent_loop_class,
    expand,
    open_image,
    render,
)
from flatrl.bad_input import need
from flatrl.rows import tool_schemas


def require_hints(rows: Iterable[dict], task, args):
    """Raises BadInput if no row has a hint or an agent loop of the task, which may tell its own."""
    ours = AgentLoopBase.__module__  # no agent loop of agent_loop.py sets told_prompt_ids
    need(
        any(
            row.get("hint") or agent_loop_class(row, task, args).__module__ != ours
            for row in rows
        ),
        "--hints (--algo opsd) learns from what the teacher is told: no training row has a 'hint', "
        "and no agent loop is the task's own, which may set extra['told_prompt_ids']",
    )


def told_prompt(row: dict, is_told: bool = True) -> list[dict]:
    """Returns the row's prompt with its hint, as a paragraph after the last message.

    Without a hint, or if the reader is not told, it is the prompt itself. Raises ValueError
    if the prompt does not end with a user's message."""
    prompt = row["prompt"]
    hint = row.get("hint")
    if not hint or not is_told:
        return prompt
    if not prompt or prompt[-1]["role"] != "user":
        raise ValueError(
            "its 'hint' is told after the last message of the prompt, which must be a user's"
        )
    *before, last = prompt
    content = last["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{hint}"
    else:  # parts, with images
        content = [*content, {"type": "text", "text": f"\n\n{hint}"}]
    return [*before, {**last, "content": content}]


def tell(output: AgentLoopOutput, row: dict, loop: AgentLoopBase):
    """Sets extra["told_prompt_ids"]: the output's prompt with the hint, for the teacher.

    Nothing happens if the agent loop has set it, if the row has no hint, or in an evaluation.
    The output's prompt begins with the row's, with or without the schemas of its tools. More may
    follow, where a template rewrote the history. Raises ValueError if the prompt begins
    otherwise."""
    if "told_prompt_ids" in output.extra or not row.get("hint") or row["validate"]:
        return
    images = [open_image(image) for image in row.get("images") or ()]
    for schemas in (tool_schemas(row, loop.task), None):
        plain, told = (
            expand(render(loop.tokenizer, messages, schemas), images, loop.processor)
            for messages in (row["prompt"], told_prompt(row))
        )
        # After the hint both prompts are equal, up to where the assistant speaks.
        n_equal = len(os.path.commonprefix([plain[::-1], told[::-1]]))
        n_plain = len(plain) - n_equal
        n_told = len(told) - n_equal
        if output.prompt_ids[:n_plain] == plain[:n_plain]:
            output.extra["told_prompt_ids"] = told[:n_told] + output.prompt_ids[n_plain:]
            return
    raise ValueError(
        "--hints: an output's prompt does not begin with its row's prompt, so the "
        "row's hint has no place there: this agent loop writes prompts of its own"
    )


def told_outputs(outputs: list[AgentLoopOutput]) -> list[AgentLoopOutput]:
    """Returns the outputs with the prompts that the teacher sees; [] if none has a hint."""
    if not any("told_prompt_ids" in output.extra for output in outputs):
        return []
    told = []
    for output in outputs:
        prompt_ids = output.extra.get("told_prompt_ids", output.prompt_ids)
        told.append(replace(output, prompt_ids=prompt_ids, extra={}))
    return told
