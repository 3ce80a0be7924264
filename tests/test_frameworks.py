"""Agents of two frameworks, unpatched, through the chat endpoint: exact tokens for all they ask.

The engine says its lines (see test_chat.py). A framework that is not installed is skipped."""

import functools
from unittest import mock

import pytest
from conftest import REPO
from openai import AsyncOpenAI
from pydantic import BaseModel
from test_agent_loop import ANSWER, END, PROMPT, SUM, call, tool_turn
from test_chat import Engine, assert_exact, assert_output, endpoint  # noqa: F401
from test_chat import run as run_on_loop

import agent_loop
from agent_loop import total_reward
from data import load_task
from examples import calculator
from flatrl.chat.endpoint import EndpointLoop
from rollout import set_rewards
from train import Args

QUESTION = PROMPT[0]["content"]
JSON = '{"answer": 2}'
PARALLEL = SUM + "\n" + call(expression="2*3")


class Answer(BaseModel):
    """The answer."""

    answer: int


# ---------------------------------------------------------------- what frameworks can ask for
# Each returns a coroutine function of (base_url, api_key), which returns the agent's answer.


def openai_agents(api="responses", stream=False, form=None, **settings):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    kinds = {
        "responses": agents.OpenAIResponsesModel,
        "chat": agents.OpenAIChatCompletionsModel,
    }

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            agent = agents.Agent(
                "a",
                tools=[agents.function_tool(calculator.calculator)],
                output_type=form,
                model=kinds[api]("policy", client),
                model_settings=agents.ModelSettings(**settings),
            )
            if not stream:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            assert len([event async for event in result.stream_events()]) > 2
            return result.final_output

    return agent


def langgraph(form=None, choice=None, **how):
    pytest.importorskip("langgraph")
    openai = pytest.importorskip("langchain_openai")
    from examples import langgraph_math

    class Model(openai.ChatOpenAI):
        def bind_tools(self, tools, **more):
            return super().bind_tools(tools, **{"tool_choice": choice} | more)

    async def agent(base_url, api_key):
        make = functools.partial(Model, **how)
        if form:
            model = make(base_url=base_url, api_key=api_key, model="policy", max_retries=0)
            return await model.with_structured_output(Answer, method=form).ainvoke(QUESTION)
        with mock.patch.object(langgraph_math, "ChatOpenAI", make):
            graph = langgraph_math.build_agent(base_url, api_key)
        return (await graph.ainvoke({"messages": PROMPT}))["messages"][-1].text

    return agent


TWO = Answer(answer=2)
FREELY = dict(tool_choice="required", parallel_tool_calls=False, temperature=0.5, max_tokens=99)
# The framework, how it is used, what the policy says (a list: in a format, so not trained), and
# what the agent returns.
CELLS = [
    (openai_agents, dict(api="responses", stream=True), (SUM, ANSWER), ANSWER),
    (openai_agents, dict(api="chat", stream=False), (PARALLEL, ANSWER), ANSWER),
    (openai_agents, dict(api="responses", form=Answer), [SUM, JSON], TWO),
    (openai_agents, dict(api="responses", **FREELY), (SUM, ANSWER), ANSWER),
    (langgraph, dict(use_responses_api=True, streaming=True), (SUM, ANSWER), ANSWER),
    (langgraph, dict(streaming=True), (SUM, ANSWER), ANSWER),
    (langgraph, dict(choice="any"), (PARALLEL, ANSWER), ANSWER),
    (langgraph, dict(form="function_calling"), (call("Answer", answer=2),), TWO),
    (langgraph, dict(form="json_schema"), [JSON], TWO),
]


def name_of(value) -> str:
    return getattr(value, "__name__", str(value)[:70])


@pytest.mark.parametrize("framework, how, lines, expected", CELLS, ids=name_of)
def test_a_feature_of_a_framework(framework, how, lines, expected, endpoint, tokenizer):  # noqa: F811
    found = []
    agent = framework(**how)

    class Loop(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            found.append(await agent_loop.call(agent, base_url, api_key))

    engine = Engine(tokenizer, tuple(lines))
    args = Args(max_response_tokens=4000, max_assistant_turns=0)
    outputs = run_on_loop(Loop(engine, tokenizer, None, None, args).run({}, prompt=PROMPT))
    assert found == [expected] and len(engine.prompts) == len(lines)
    constrained = ["structured_outputs" in params for params in engine.params]
    if isinstance(lines, list):
        assert not any(sum(output.response_mask) for output in outputs)
        assert all(constrained)
    else:
        assert_exact(outputs, engine)
        assert not any(constrained)


# ---------------------------------------------------------------- examples/langgraph_math.py


@pytest.fixture
def play(endpoint, tokenizer):  # noqa: F811
    """play(line, ..., **limits) -> (graded outputs, engine) on the first validation row."""
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    task = load_task(str(REPO / "examples/langgraph_math.py"))
    row = task.load("val")[0]  # What is 15+35?
    row["prompt"].insert(0, {"role": "system", "content": task.SYSTEM_PROMPT})

    def play(*lines, **limits):
        args = Args(**{"max_response_tokens": 2000, "max_assistant_turns": 0} | limits)
        engine = Engine(tokenizer, lines)
        loop = agent_loop.AGENT_LOOPS["langgraph"](engine, tokenizer, None, task, args)
        of_run = dict(step=0, index=0, rollout_n=0, validate=False)
        outputs = run_on_loop(loop.run({}, **row, **of_run))
        run_on_loop(set_rewards(task, outputs, row))
        assert_exact(outputs, engine)
        return outputs, engine

    return play


@pytest.mark.parametrize("expression, answer, reward", [("15+35", "50", 1.0), ("15+36", "51", 0.0)])
def test_a_right_answer_is_rewarded_and_a_wrong_one_not(play, expression, answer, reward):
    said = [call(expression=expression), f"<answer>{answer}</answer>"]
    (output,), engine = play(*said)
    assert total_reward(output) == reward
    assert_output(output, engine, (1, said[0] + END), tool_turn(answer), (2, said[1] + END))


def test_the_limit_of_turns_is_the_runs(play):
    """... where the framework's own would be lower."""
    lines = [call(expression="1+1")] * 12
    outputs, engine = play(*lines, ANSWER)
    assert len(engine.prompts) == 13 and outputs[-1].stop_reason == "stop"
