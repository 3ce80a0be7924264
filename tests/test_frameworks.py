"""Agents of frameworks, unpatched, through the chat endpoint: what each can ask for, exact tokens, one training run.

The engine says its lines (see test_chat.py). A framework that is not installed is skipped: verifiers can't be installed
beside vLLM without other versions of what requirements-test.txt pins.
"""

import functools
import importlib.util
import json
from unittest import mock

import pytest
from conftest import REPO, SMALL_CACHE, metrics_of, run
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
from rollout import score
from train import Args

QUESTION = PROMPT[0]["content"]
JSON = '{"answer": 2}'
PARALLEL = SUM + "\n" + call(expression="2*3")


class Answer(BaseModel):
    """The answer."""

    answer: int


# ---------------------------------------------------------------------------------------------------------------------
# What frameworks can ask for: each returns a coroutine function of (base_url, api_key) that gives the agent's answer


def openai_agents(api="responses", stream=False, form=None, **settings):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    kind = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[api]

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            how = dict(model=kind("policy", client), model_settings=agents.ModelSettings(**settings))
            agent = agents.Agent("a", tools=[agents.function_tool(calculator.calculator)], output_type=form, **how)
            if not stream:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            assert len([event async for event in result.stream_events()]) > 2
            return result.final_output

    return agent


def pydantic_ai(api="chat", stream=False, form=str, **settings):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"responses": openai.OpenAIResponsesModel, "chat": openai.OpenAIChatModel}[api]
    form = pydantic_ai.NativeOutput(Answer) if form == "native" else form

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = kind("policy", provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, tools=[calculator.calculator], output_type=form, model_settings=settings)
            if not stream:
                return (await agent.run(QUESTION)).output
            async with agent.run_stream(QUESTION) as result:
                return await result.get_output()

    return agent


def smolagents(kind="ToolCallingAgent", stream=False, **how):
    smolagents = pytest.importorskip("smolagents")

    def agent(base_url, api_key):
        model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0})
        templates = smolagents.EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Calculate."}
        more = dict(prompt_templates=templates, max_steps=3, verbosity_level=-1, stream_outputs=stream, **how)
        return getattr(smolagents, kind)([smolagents.tool(calculator.calculator)], model, **more).run(QUESTION)

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


FINAL = call("final_answer", answer="2")
CODE = "<code>\nfinal_answer(calculator('1+1'))\n</code>"
THOUGHT = json.dumps({"thought": "", "code": "final_answer(calculator('1+1'))"})
RESULT = call("final_result", answer=2)
CALLED = call("Answer", answer=2)
TWO = Answer(answer=2)
# framework, how it is used, what the policy says (a list: in a format, so not trained), what the agent returns
CELLS = [
    *((openai_agents, dict(api=api, stream=stream), (SUM, ANSWER), ANSWER)
      for api in ("responses", "chat") for stream in (False, True)),
    *((openai_agents, dict(api=api, form=Answer), [SUM, JSON], TWO) for api in ("responses", "chat")),
    *((openai_agents, dict(api=api, tool_choice="required", parallel_tool_calls=False, temperature=0.5, max_tokens=99),
       (SUM, ANSWER), ANSWER) for api in ("responses", "chat")),
    (openai_agents, dict(), (PARALLEL, ANSWER), ANSWER),
    *((pydantic_ai, dict(api=api, stream=stream), (SUM, ANSWER), ANSWER)
      for api in ("responses", "chat") for stream in (False, True)),
    *((pydantic_ai, dict(api=api, form=Answer), (SUM, RESULT), TWO) for api in ("responses", "chat")),
    *((pydantic_ai, dict(api=api, form="native"), [SUM, JSON], TWO) for api in ("responses", "chat")),
    (pydantic_ai, dict(temperature=0.5, seed=1, parallel_tool_calls=True), (PARALLEL, ANSWER), ANSWER),
    *((smolagents, dict(stream=stream), (SUM, FINAL), "2") for stream in (False, True)),
    *((smolagents, dict(kind="CodeAgent", stream=stream), (CODE,), "2") for stream in (False, True)),
    (smolagents, dict(kind="CodeAgent", use_structured_outputs_internally=True), [THOUGHT], "2"),
    *((langgraph, dict(use_responses_api=api, streaming=stream), (SUM, ANSWER), ANSWER)
      for api in (True, False) for stream in (False, True)),
    (langgraph, dict(choice="any"), (PARALLEL, ANSWER), ANSWER),
    (langgraph, dict(form="function_calling"), (CALLED,), TWO),
    *((langgraph, dict(form="json_schema", use_responses_api=api), [JSON], TWO) for api in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize("framework, how, lines, expected", CELLS, ids=lambda x: getattr(x, "__name__", str(x)[:70]))
def test_a_feature_of_a_framework(framework, how, lines, expected, endpoint, tokenizer):  # noqa: F811
    found, agent = [], framework(**how)

    class Loop(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            found.append(await agent_loop.call(agent, base_url, api_key))

    engine = Engine(tokenizer, tuple(lines))
    args = Args(max_response_tokens=4000, max_assistant_turns=0)
    outputs = run_on_loop(Loop(engine, tokenizer, None, None, args).run({}, prompt=PROMPT))
    assert found == [expected] and len(engine.prompts) == len(lines)
    if isinstance(lines, list):
        assert not any(sum(output.response_mask) for output in outputs)
        assert all("structured_outputs" in params for params in engine.params)
    else:
        assert_exact(outputs, engine)
        assert not any("structured_outputs" in params for params in engine.params)


# ---------------------------------------------------------------------------------------------------------------------
# The task files


TASKS = {
    "langgraph": "langgraph_math", "openai_agents": "openai_agents", "pydantic_agent": "pydantic_agent",
    "smol_tools": "smolagents_math", "smol_code": "smolagents_math", "verifiers": "verifiers_env",
}  # fmt: skip
PACKAGES = {"langgraph": "langgraph", "openai_agents": "agents", "pydantic_agent": "pydantic_ai",
            "smol_tools": "smolagents", "smol_code": "smolagents", "verifiers": "verifiers"}  # fmt: skip


def play(name, endpoint, tokenizer, *lines, **limits):  # noqa: F811
    """The outputs of a task file's agent on its first validation row, scored, and the engine."""
    pytest.importorskip(PACKAGES[name])
    task = load_task(str(REPO / "examples" / f"{TASKS[name]}.py"))
    row = task.load("val")[0]  # What is 15+35?
    if hasattr(task, "SYSTEM_PROMPT"):
        row["prompt"] = [{"role": "system", "content": task.SYSTEM_PROMPT}, *row["prompt"]]
    args = Args(**{"max_response_tokens": 2000, "max_assistant_turns": 0} | limits)
    engine = Engine(tokenizer, lines)
    loop = agent_loop.AGENT_LOOPS[name](engine, tokenizer, None, task, args)
    outputs = run_on_loop(loop.run({}, **row, step=0, index=0, rollout_n=0, validate=False))
    run_on_loop(score(task, outputs, row))
    assert_exact(outputs, engine)
    return outputs, engine


LINES = {
    "smol_tools": [call(expression="15+35"), call("final_answer", answer="50")],
    "smol_code": ['<code>\nfinal_answer(calculator("15+35"))\n</code>'],
}


@pytest.mark.parametrize("name", TASKS)
def test_a_right_answer_is_rewarded_and_a_wrong_one_not(name, endpoint, tokenizer):  # noqa: F811
    lines = LINES.get(name, [call(expression="15+35"), "<answer>50</answer>"])
    for said, reward in ((lines, 1.0), ([line.replace("50", "51").replace("35", "36") for line in lines], 0.0)):
        outputs, engine = play(name, endpoint, tokenizer, *said)
        assert total_reward(outputs[-1]) == reward
        if name not in LINES:
            given = tool_turn("50" if reward else "51")
            assert_output(outputs[0], engine, (1, said[0] + END), given, (2, said[1] + END))


@pytest.mark.parametrize("name", ["openai_agents", "pydantic_agent", "verifiers"])
@pytest.mark.parametrize("line", [call(expression="1/0"), call("abacus", beads=2)])
def test_a_wrong_call_costs_the_reward_and_no_trajectory(name, line, endpoint, tokenizer):  # noqa: F811
    outputs, engine = play(name, endpoint, tokenizer, *[line] * 3, "I give up.")
    assert total_reward(outputs[-1]) == 0.0 and 1 <= len(engine.prompts) <= 4


@pytest.mark.parametrize("name", ["openai_agents", "pydantic_agent", "smol_tools", "verifiers"])
def test_out_of_turns(name, endpoint, tokenizer):  # noqa: F811
    outputs, _ = play(name, endpoint, tokenizer, call(expression="15+35"), max_assistant_turns=1)
    assert total_reward(outputs[-1]) == 0.0 and outputs[-1].num_turns == 2


def test_agents_of_all_frameworks_are_trained(cache, tmp_path):
    """Within three steps of one run, whose rows name the agent, all of them answer.

    The model is warmed up on two questions: it knows by heart how to guess and how to call the tool."""
    names = [name for name, package in PACKAGES.items() if name != "verifiers" and importlib.util.find_spec(package)]
    assert "langgraph" in names
    smol_chats = ", *smolagents_math.demonstrations(row)" if "smol_tools" in names else ""
    task = tmp_path / "few.py"
    task.write_text(f"""
from examples import calculator, {", ".join({TASKS[name] for name in names})}
from examples.calculator import reward
from examples.tiny_models import build_warm_model
ROWS = calculator.load("train")[:2]
def load(split):
    system = [{{"role": "system", "content": calculator.SYSTEM_PROMPT}}]
    return [row | {{"prompt": system + row["prompt"], "agent_name": name, "data_source": name}}
            for row in ROWS for name in {names}]
def build_model(path):
    chats = []
    for row in ROWS * 160:
        own = calculator.demonstration(row)
        own[0]["content"] += "\\nTools: calculator"
        chats += [own{smol_chats}]
    build_warm_model(path, chats)
""")
    run("--task", task, "--num_steps", "3", "--prompts_per_step", str(2 * len(names)), "--eval_every", "0",
        "--lr", "1e-3", "--save_every", "0", "--deterministic", "--engine_args", SMALL_CACHE,
        "--output_dir", tmp_path / "run", cache=cache)  # fmt: skip
    first, *rows = metrics_of(tmp_path / "run")
    for name in names:
        assert rows[-1][f"eval/{name}/reward"] >= max(first[f"eval/{name}/reward"], 0.75), name
    assert rows[-1]["eval/reward"] > first["eval/reward"] + 0.15, [row["reward/mean"] for row in rows]
    for row in rows:
        assert row["rollout/trajectories"] == 2 * 8 * len(names) and row["rollout/logp_diff_max"] < 1e-3
        assert row["rollout/segments"] >= 1
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000003.jsonl").open()]
    assert any(r["messages"][-2]["role"] == "tool" and r["reward"] == 1.0 for r in rollouts)
