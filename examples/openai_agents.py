"""An agent of the OpenAI Agents SDK on arithmetic, trained unchanged by the Responses API.

    pip install openai-agents
    accelerate launch train.py --task examples/openai_agents.py --agent openai_agents

The agent is the SDK's own: Agent, Runner, function_tool, its default model. All that it knows of
flatrl is a base_url and a key of the chat endpoint. What the model does wrong (a tool that isn't
there, turns without end) raises an AgentsException: that ends the conversation, which is graded
like any other. An `output_type` is a response_format: flatrl/chat/openai_api.py says what is trained
then."""

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
