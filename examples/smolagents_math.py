"""smolagents' ToolCallingAgent and CodeAgent on arithmetic, trained unchanged over HTTP.

    pip install smolagents
    accelerate launch train.py --task examples/smolagents_math.py --agent smol_tools   # or smol_code

Both agents tell the model about earlier steps in words of their own, so every step is a token
sequence of its own (rollout/segments). They get short prompts, for the built-in model, which is
warmed up on them; without `prompt_templates` they have smolagents' own, which are 3,400 tokens for
that model. The reward looks at what the agent returns. CodeAgent runs the model's code in this
process, by smolagents' interpreter: for a model that you don't trust see its executors."""

from openai import DefaultHttpxClient

from agent_loop import BadInput, register
from examples.calculator import calculator, load  # noqa: F401
from examples.endpoint import EndpointLoop
from examples.smolagents_model import PROMPTS, build_model  # noqa: F401

try:
    from smolagents import EMPTY_PROMPT_TEMPLATES, CodeAgent, OpenAIModel, ToolCallingAgent, tool
except ImportError:
    raise BadInput("examples/smolagents_math.py needs: pip install smolagents") from None

AGENTS = {"smol_tools": ToolCallingAgent, "smol_code": CodeAgent}
TOOL = tool(calculator)
CLIENT = {"max_retries": 0, "http_client": DefaultHttpxClient()}  # all trajectories share it


class SmolAgent(EndpointLoop):
    """One run of the agent, which is no coroutine and so runs in a thread."""

    def agent(self, base_url: str, api_key: str, row: dict) -> float:
        model = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs=CLIENT)
        templates = EMPTY_PROMPT_TEMPLATES | {"system_prompt": PROMPTS[self.name]}
        agent = AGENTS[self.name]([TOOL], model, prompt_templates=templates, max_steps=3, verbosity_level=-1)
        answer = agent.run(row["prompt"][-1]["content"])
        return float(str(answer).strip() == row["reward_model"]["ground_truth"])


for name in AGENTS:
    register(name)(type(name, (SmolAgent,), {"name": name}))


def reward(output, row: dict) -> float:
    """Returns 0.0, for an agent that ran out of tokens or turns: it has returned nothing."""
    return 0.0
