r"""verl's agent loops, ported: what each name becomes.

    accelerate launch train.py --task examples/verl_port.py               # the calculator's rows
    accelerate launch train.py --task examples/verl_port.py --agent ported_tool_agent \
        --model Qwen/Qwen2.5-0.5B-Instruct --train_files train.parquet --val_files test.parquet

The files have verl's columns, as they are.

verl                                                   here
agent_loop_config_path, `_target_`, hydra              nothing: `@register(name)` in the task file
@register("x"), row's agent_name, default_agent_loop   the same, the same, `--agent x`
run(self, sampling_params, **kwargs)                   the same; one output, or a list of them
kwargs["raw_prompt"], kwargs["extra_info"], ...        kwargs["prompt"], kwargs["extra_info"], ...
kwargs["tools_kwargs"], ["interaction_kwargs"]         row_kwargs(kwargs, "tools_kwargs"), ...
self.config...rollout.response_length, .prompt_length  self.args.max_response_tokens, .max_prompt_tokens
...multi_turn.max_assistant_turns, .format             self.args.max_assistant_turns, .tool_parser
...multi_turn.max_parallel_calls                       self.args.max_parallel_calls
...multi_turn.tool_response_truncate_side              self.args.tool_response_truncate_side (what is kept)
...multi_turn.max_tool_response_length (characters)    self.args.max_tool_response_tokens
...multi_turn.max_user_turns (tool turns count)        self.args.max_user_turns (a simulated user's alone)
...multi_turn.tool_config_path, interaction_...        TOOLS, INTERACTIONS in the task file
init_class, tools loaded once                          module-level code of the task file
server_manager.generate(...)                           engine.generate(...), the same four keywords; but
                                                       sampling_params needs "max_tokens" (vLLM: 16)
output.token_ids, .log_probs, .stop_reason             .token_ids, .logprobs, .stop_reason; .versions
apply_chat_template(messages, tools=...)               render(self.tokenizer, messages, schemas)
the same on tool messages, minus the system prompt     self.append(trajectory, messages, schemas, stops): a
                                                       template difference, which keeps the newline after
                                                       <|im_end|>; False if it does not fit
loop.run_in_executor(None, f, x)                       await in_thread(f, x); call(f, x) if f may be async
tool_parser.extract_tool_calls(response_ids)           parse_tool_calls(text, args.tool_parser, tokenizer,
                                                       schemas)
AgentData; response_mask += [1] * n, [0] * n           self.start(row, schemas) -> Trajectory; add_sampled,
                                                       add_given
AgentLoopOutput.response_logprobs (optional)           required, 0.0 where the mask is 0; so is
                                                       response_versions, -1
.reward_score, .multi_modal_data, .extra_fields        .reward, .images, .extra
.extra_fields["turn_scores"], ["tool_rewards"]         .turn_rewards: (index of a response token, reward)
.metrics (AgentLoopMetrics), simple_timer              .metrics, a dict of numbers; generating is timed
.num_turns                                             the same: assistant + user or tool turns + 1
[: self.response_length] at the end                    nothing: max_tokens and room() keep it short enough
BaseTool.create -> (instance_id, _); execute(id, ..)   Tool.create(request_id), execute(request_id, ..): one
                                                       per trajectory; a function is a tool too
start_interaction, finalize_interaction                start, finalize; generate_response is the same
"""  # noqa: E501

import asyncio
from uuid import uuid4

from agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    parse_tool_calls,
    register,
    render,
    row_kwargs,
    task_tools,
)
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model, reward  # noqa: F401


def load(split: str) -> list[dict]:
    """Returns the calculator's rows for the tool agent below."""
    return [row | {"agent_name": "ported_tool_agent"} for row in calculator.load(split)]


@register("ported_single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """verl's SingleTurnAgentLoop, name by name; the comments have verl's own lines."""

    async def run(self, sampling_params: dict, **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["prompt"])  # kwargs["raw_prompt"]
        # run_in_executor(None, apply_chat_template): here it is cached, so no thread
        prompt_ids = render(self.tokenizer, messages)
        # self.server_manager.generate
        output = await self.engine.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params={"max_tokens": self.args.max_response_tokens, **sampling_params},
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,  # [: self.response_length]
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.logprobs,  # output.log_probs, optional
            response_versions=output.versions,
            num_turns=2,
            stop_reason=output.stop_reason,
        )  # text and messages, which the reward reads, are filled in later


@register("ported_tool_agent")
class CustomToolAgentLoop(AgentLoopBase):
    """A loop like verl's ToolAgentLoop, by the methods of AgentLoopBase.

    For tools with state (create, release) or simulated users, subclass ToolAgentLoop instead."""

    async def run(self, sampling_params: dict, **kwargs) -> list[AgentLoopOutput]:
        # initialize_tools_from_config
        self.tools = task_tools(self.task, row_kwargs(kwargs, "tools_kwargs"))
        schemas = [tool.schema for tool in self.tools.values()]
        stops = self.stop_token_ids(sampling_params)
        # AgentData(...), apply_chat_template(messages, tools=tool_schemas)
        agent_data = self.start(kwargs, schemas)
        while True:
            # server_manager.generate, response_mask += [1] * n, response_logprobs += ...
            text = await self.assistant_turn(agent_data, sampling_params)
            if text is None:  # len(response_mask) >= self.response_length
                break
            # extract_tool_calls
            _, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, schemas)
            if not calls:
                break
            if agent_data.assistant_turns == self.args.max_assistant_turns:
                agent_data.stop_reason = "max_turns"
                break
            calls = calls[: self.args.max_parallel_calls]
            called = [self._call_tool(call, agent_data.request_id) for call in calls]
            messages = await asyncio.gather(*called)
            # apply_chat_template(messages)[len(self.system_prompt) :], response_mask += [0] * n,
            # user_turns += 1
            if not self.append(agent_data, messages, schemas, stops):
                break  # more than response_length: the stop reason is "length"
        # One output, unless the template rewrote the history (Qwen3 drops earlier reasoning).
        return agent_data.outputs()

    async def _call_tool(self, tool_call: dict, request_id: str) -> dict:
        """Executes a call; returns the tool's message, which holds the error if there is one."""
        try:
            # verl ends the trajectory at a malformed call; here the model can read why.
            if tool_call["error"]:
                raise ValueError(tool_call["error"])
            tool = self.tools[tool_call["name"]]
            async with asyncio.timeout(self.args.tool_timeout):
                response = await tool.execute(request_id, tool_call["arguments"])
        except Exception as error:
            response = f"Error: {str(error) or repr(error)}"
        return {"role": "tool", "content": str(response)}
