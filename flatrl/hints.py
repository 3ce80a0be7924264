"""What the policy is told when it is its own teacher (--hints, --algo opsd): a row's `hint`.

The teacher has the policy's weights. It scores the tokens that the policy sampled, after the
same prompt with the hint in it. Tokens that the hint makes likelier get positive advantages."""

import os
from dataclasses import replace

from agent_loop import AgentLoopBase, AgentLoopOutput, render
from flatrl.rows import tool_schemas
from flatrl.tools import join_contents
from flatrl.vision import expand, load_images


def told_prompt(row: dict) -> list[dict]:
    """Returns a row's prompt for the teacher, with its hint, if any, after the last message.

    Raises ValueError if the prompt does not end with a user's message."""
    prompt = row["prompt"]
    if not row.get("hint"):
        return prompt
    if not prompt or prompt[-1]["role"] != "user":
        raise ValueError("its 'hint' follows the prompt's last message, which must be a user's")
    *earlier, last = prompt
    content = join_contents([last["content"], f"\n\n{row['hint']}"], "")
    return [*earlier, last | {"content": content}]


def tell(output: AgentLoopOutput, row: dict, loop: AgentLoopBase):
    """Sets extra["told_prompt_ids"]: the output's prompt with the hint, for the teacher.

    An agent loop may set it itself. Raises ValueError unless the output's prompt begins with the
    row's, with or without the schemas of its tools. Nothing is set in an evaluation."""
    if not row.get("hint") or row["validate"] or "told_prompt_ids" in output.extra:
        return
    images = load_images(row.get("images") or ())

    def ids_of(messages, schemas):
        ids = render(loop.tokenizer, messages, schemas)
        return expand(ids, images, loop.processor)

    for schemas in (tool_schemas(row, loop.task), None):
        plain = ids_of(row["prompt"], schemas)
        told = ids_of(told_prompt(row), schemas)
        # Both end alike after the hint; here in "<end>": "2+2?<end>" and "2+2? It is 4.<end>".
        n_equal = len(os.path.commonprefix([plain[::-1], told[::-1]]))
        n_plain = len(plain) - n_equal
        if output.prompt_ids[:n_plain] == plain[:n_plain]:
            told = told[: len(told) - n_equal]
            output.extra["told_prompt_ids"] = told + output.prompt_ids[n_plain:]
            return
    raise ValueError("--hints: an output's prompt does not begin with its row's")


def told_outputs(outputs: list[AgentLoopOutput]) -> list[AgentLoopOutput]:
    """Returns the outputs with the prompts that the teacher sees; [] if none has a hint."""
    name = "told_prompt_ids"
    if not any(name in output.extra for output in outputs):
        return []
    return [
        replace(output, prompt_ids=output.extra.get(name, output.prompt_ids), extra={})
        for output in outputs
    ]
