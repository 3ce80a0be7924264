"""GSM8K with a simulated user, who says if the answer is wrong, so that the model tries again.

    accelerate launch train.py --task examples/gsm8k_user.py --max_response_tokens 256
    accelerate launch train.py --task examples/gsm8k_user.py --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train_files ~/data/gsm8k/train.parquet --val_files ~/data/gsm8k/test.parquet \\
        --max_prompt_tokens 1024 --max_response_tokens 2048

The files are those of verl's examples/data_preprocess/gsm8k_multiturn_w_interaction.py; without
them there are the bundled problems. The user pays all reward: 1 for an answer that is right at
once, 1/2 at the second try, 1/3 at the third, and 0 for a wrong one (a penalty would make it pay to
run out of tokens instead of answering)."""

from agent_loop import Interaction
from examples import gsm8k
from examples.calculator import build_model  # noqa: F401  (train.py calls it without a --model)

SYSTEM_PROMPT = (
    'Solve the problem step by step. End with "#### N". If the user says it is wrong, think again.'
)


def load(split: str) -> list[dict]:
    """Returns the rows of gsm8k.py, each with what its user has to know."""
    rows = gsm8k.load(split)
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {
            "name": "gsm8k",  # picks the interaction; its methods get the other items
            "query": row["prompt"][-1]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
        }
    return rows


class GSM8KUser(Interaction):
    """Checks the answer of each assistant turn, up to max_tries times.

    One instance serves all trajectories, so the state of each is kept under its request_id."""

    name = "gsm8k"

    def __init__(self, max_tries: int = 3):
        self.max_tries = max_tries
        self.tries: dict[str, int] = {}  # request_id -> answers so far

    async def start(self, request_id: str, *, ground_truth: str, **kwargs) -> None:
        self.tries[request_id] = 0

    async def generate_response(
        self, request_id: str, messages: list[dict], *, ground_truth: str, **kwargs
    ) -> tuple:
        """Grades the last message; returns (done, text, reward, metrics)."""
        self.tries[request_id] += 1
        tries = self.tries[request_id]
        grade = gsm8k.grade(messages[-1]["content"] or "", ground_truth)
        if grade["score"]:
            return True, "Right!", 1 / tries, {"tries": 1, "right": 1}
        complaint = 'I see no answer. End with "#### N".'
        if grade["format"]:
            complaint = "That is wrong. Try again."
        return tries >= self.max_tries, complaint, 0.0, {"tries": 1}

    async def finalize(self, request_id: str) -> None:
        self.tries.pop(request_id, None)  # there is none if `start` has failed


INTERACTIONS = [GSM8KUser()]


def reward(output, row: dict) -> dict:
    """Returns a score of 0.0, which is added to the user's payments; "right" is logged."""
    return {"score": 0.0, "right": gsm8k.reward(output, row)["score"]}
