"""An agent framework over HTTP: a LangGraph agent on arithmetic, trained unchanged.

    pip install langgraph langchain-openai
    accelerate launch train.py --task examples/langgraph_math.py --agent langgraph
    accelerate launch train.py --task examples/langgraph_math.py --agent langgraph \\
        --model Qwen/Qwen2.5-0.5B-Instruct

This is verl's LangGraph example. The agent is plain LangGraph, which knows nothing of flatrl but a
base_url and a key. All its calls are recorded as exact tokens, so the whole conversation is trained
as one trajectory."""

from agent_loop import BadInput, register
from examples.calculator import SYSTEM_PROMPT, build_model, calculator, load, reward  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

try:
    import openai
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
except ImportError:
    raise BadInput(
        "examples/langgraph_math.py needs: pip install langgraph langchain-openai"
    ) from None

# All rollouts share these: a new client reads certificates for 80 ms, in which they would all wait.
# trust_env=False: no proxy leads to the endpoint.
HTTP_CLIENTS = {
    "http_client": openai.DefaultHttpxClient(trust_env=False),
    "http_async_client": openai.DefaultAsyncHttpxClient(trust_env=False),
}
# The agent executes the tool: flatrl sees only messages.
LANGCHAIN_TOOLS = [tool(calculator, parse_docstring=True)]


def build_agent(base_url: str, api_key: str):
    """Returns the graph: a model, and tools that it may call until it answers."""
    chat = ChatOpenAI(
        base_url=base_url, api_key=api_key, model="policy", max_retries=0, **HTTP_CLIENTS
    )
    model = chat.bind_tools(LANGCHAIN_TOOLS)

    async def call_model(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(LANGCHAIN_TOOLS, handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


@register("langgraph")
class LangGraphAgent(EndpointLoop):
    """One conversation of the graph; the reward is the task's, on the recorded messages."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> None:
        agent = build_agent(base_url, api_key)
        await agent.ainvoke({"messages": row["prompt"]}, {"recursion_limit": 1000})
