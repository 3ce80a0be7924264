"""An environment of the verifiers library, by its name: its rows, its rollout, its rubric.

    pip install "verifiers<0.2"
    accelerate launch train.py --task examples/verifiers_env.py --agent verifiers
    export VERIFIERS_ENV=wordle VERIFIERS_ARGS='{"num_train_examples": 500}'
    accelerate launch train.py --task examples/verifiers_env.py --agent verifiers \\
        --model Qwen/Qwen2.5-1.5B-Instruct

Later versions do not work: 0.2 and 0.3 need an mcp that vLLM does not take, and 0.4 has no such
environments. VERIFIERS_ENV is the name of an installed module, as `load_environment` takes it
(default: verifiers_calculator.py), and VERIFIERS_ARGS, a JSON object, has its other arguments.
Train and validation rows are the environment's `dataset` and `eval_dataset`. Its rollout asks the
policy through the chat endpoint. The reward is the rubric's for a single rollout; its metrics
become reward_part/*."""

import json
import os

from agent_loop import BadInput, register
from examples.calculator import build_model  # noqa: F401
from examples.endpoint import EndpointLoop

try:
    from verifiers import OpenAIChatCompletionsClient, load_environment
except ImportError:
    raise BadInput('examples/verifiers_env.py needs: pip install "verifiers<0.2"') from None

NAME = os.environ.get("VERIFIERS_ENV", "examples.verifiers_calculator")
ENV = load_environment(NAME, **json.loads(os.environ.get("VERIFIERS_ARGS", "{}")))


def load(split: str) -> list[dict]:
    """Returns the environment's rows of a split."""
    rows = ENV.get_dataset() if split == "train" else ENV.get_eval_dataset()
    return [{"prompt": row["prompt"], "extra_info": {"index": i, "row": row}} for i, row in enumerate(rows)]


@register("verifiers")
class VerifiersAgent(EndpointLoop):
    """One rollout of the environment, and its reward."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> dict:
        client = OpenAIChatCompletionsClient(self.openai(base_url, api_key))
        output = await ENV.run_rollout(row["extra_info"]["row"], client, "policy", {})
        return {**output["metrics"], "score": output["reward"]}


def reward(output, row: dict) -> float:
    """Returns 0.0, for a rollout that was cut off, which the rubric has not seen."""
    return 0.0
