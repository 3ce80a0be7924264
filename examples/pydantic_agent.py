"""An agent of pydantic-ai on arithmetic, trained unchanged through the chat endpoint.

    pip install "pydantic-ai-slim[openai]"
    accelerate launch train.py --task examples/pydantic_agent.py --agent pydantic_agent

The agent is plain pydantic-ai. When the model does something wrong, it tries again, and gives up
after some times: that ends the conversation, which is graded like any other. An `output_type` that
is a class forces a tool call, which is taken as "auto"; as NativeOutput it is a response_format:
flatrl/chat/openai_api.py says what is trained then."""

from agent_loop import BadInput, register
from examples.calculator import SYSTEM_PROMPT, build_model, calculator, load, reward  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

try:
    from pydantic_ai import Agent, ModelRetry, UnexpectedModelBehavior, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError:
    raise BadInput('examples/pydantic_agent.py needs: pip install "pydantic-ai-slim[openai]"') from None

AGENT = Agent()


@AGENT.tool_plain(name="calculator", description=calculator.__doc__, retries=3)
def calculate(expression: str) -> str:
    try:
        return calculator(expression)
    except ValueError as error:
        raise ModelRetry(str(error)) from None


@register("pydantic_agent")
class PydanticAgent(EndpointLoop):
    """One run of the agent; the reward is the task's, on the recorded messages."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> None:
        system, question = row["prompt"]
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=self.openai(base_url, api_key)))
        limits = UsageLimits(request_limit=None)  # the run's flags are the limit
        try:
            await AGENT.run(question["content"], instructions=system["content"], model=model, usage_limits=limits)
        except UnexpectedModelBehavior:
            pass
