"""The Responses API: an agent of the OpenAI Agents SDK on arithmetic, trained unchanged.

    pip install openai-agents
    accelerate launch train.py --task examples/openai_agents.py --agent openai_agents

The agent uses only the SDK: Agent, Runner, function_tool and its default model. It knows nothing of
flatrl but a base_url and a key. Mistakes of the model (a call of an unknown tool, endless turns)
raise an AgentsException. That ends the conversation, which is graded like any other. An
`output_type` is a response_format: see flatrl/chat/openai_api.py for what is trained then."""

from agent_loop import BadInput, register
from examples.calculator import SYSTEM_PROMPT, build_model, calculator, load, reward  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

try:
    from agents import (
        Agent,
        AgentsException,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
except ImportError:
    raise BadInput("examples/openai_agents.py needs: pip install openai-agents") from None

set_tracing_disabled(True)  # traces would be sent to OpenAI
TOOL = function_tool(calculator)


@register("openai_agents")
class OpenAIAgent(EndpointLoop):
    """One run of the agent; the reward is the task's, on the recorded messages."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> None:
        system, *question = row["prompt"]
        model = OpenAIResponsesModel("policy", self.openai(base_url, api_key))
        agent = Agent("solver", instructions=system["content"], tools=[TOOL], model=model)
        try:
            await Runner.run(agent, question, max_turns=self.args.max_assistant_turns or 1000)
        except AgentsException:
            pass
