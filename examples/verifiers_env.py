"""An environment of the verifiers library, by its name: its rows, its rollout, its rubric.

This is an adapter: it shows how such an environment is connected. It was not shown to learn.

    pip install "verifiers<0.2"
    accelerate launch train.py --task examples/verifiers_env.py --agent verifiers
    export VERIFIERS_ENV=wordle VERIFIERS_ARGS='{"num_train_examples": 500}'
    accelerate launch train.py --task examples/verifiers_env.py --agent verifiers \\
        --model Qwen/Qwen2.5-1.5B-Instruct

Later versions do not work: 0.2 and 0.3 need an mcp that vLLM does not take, and 0.4 has no such
environments. VERIFIERS_ENV is the name of an installed module, as verifiers.load_environment takes
it, and VERIFIERS_ARGS, a JSON object, has its other arguments. Without it the environment is the
default task, written for verifiers below.
Train and validation rows are the environment's `dataset` and `eval_dataset`. Its rollout asks the
policy through the chat endpoint. The reward is the rubric's for a single rollout; its metrics
become reward_part/*."""

import json
import os

from agent_loop import BadInput, register
from examples import calculator
from examples.calculator import build_model  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

try:
    import verifiers
    from datasets import Dataset
except ImportError:
    raise BadInput('examples/verifiers_env.py needs: pip install "verifiers<0.2"') from None


def correct(completion, answer) -> float:
    """Returns the default task's own reward, on the messages that the environment has seen."""
    last = completion[-1]
    output = type("Output", (), {"messages": [{"role": last.role, "content": last.content}]})
    return calculator.reward(output, {"reward_model": {"ground_truth": answer}})


def calculator_rows(split: str) -> Dataset:
    """Returns the default task's rows with the columns of verifiers."""
    return Dataset.from_list([
        {"question": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]}
        for row in calculator.load(split)
    ])  # fmt: skip


def calculator_environment() -> verifiers.Environment:
    """Returns the default task as an environment of verifiers."""
    return verifiers.ToolEnv(
        tools=[calculator.calculator], dataset=calculator_rows("train"), max_turns=8,
        eval_dataset=calculator_rows("val"), system_prompt=calculator.SYSTEM_PROMPT,
        rubric=verifiers.Rubric(funcs=[correct]),
    )  # fmt: skip


if "VERIFIERS_ENV" in os.environ:
    ARGS = json.loads(os.environ.get("VERIFIERS_ARGS", "{}"))
    ENV = verifiers.load_environment(os.environ["VERIFIERS_ENV"], **ARGS)
else:
    ENV = calculator_environment()


def load(split: str) -> list[dict]:
    """Returns the environment's rows of a split."""
    rows = ENV.get_dataset() if split == "train" else ENV.get_eval_dataset()
    return [{"prompt": row["prompt"], "extra_info": {"index": i, "row": row}} for i, row in enumerate(rows)]


@register("verifiers")
class VerifiersAgent(EndpointLoop):
    """One rollout of the environment, and its reward."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> dict:
        client = verifiers.OpenAIChatCompletionsClient(self.openai(base_url, api_key))
        output = await ENV.run_rollout(row["extra_info"]["row"], client, "policy", {})
        return {**output["metrics"], "score": output["reward"]}


def reward(output, row: dict) -> float:
    """Returns 0.0, for a rollout that was cut off, which the rubric has not seen."""
    return 0.0
