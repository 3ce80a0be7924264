"""How much does a rollout cost beyond plain `LLM.generate`?

    python bench/rollout.py --rounds 9                  # one turn
    python bench/rollout.py --turns 4 --spread tail     # most turns are short, a few are long

Both sides have the same engine, prompts and lengths, and take turns in one process. With --turns a
simulated user answers between the turns, at once, and `generate` is called once a turn. --spread
tail draws the lengths of turns from an exponential distribution, up to eight times --tokens.
"""

import itertools
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import common
import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer

import train
from agent_loop import Interaction, ToolAgentLoop, chat_template, register, render
from examples import calculator
from flatrl.processes import Background
from rollout import rollout

LONGEST = 8  # times --tokens
FORCED = {"temperature": 1.0, "ignore_eos": True}
ANSWER = "Go on."  # the simulated user's
STEPS = itertools.count()


class User(Interaction):
    """A simulated user, who always answers."""

    async def generate_response(self, request_id, messages, **kwargs):
        return False, ANSWER, None, {}


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """An agent loop whose turns end when they reach their length, without being cut off."""

    async def run(self, sampling_params, **row):
        index = row["extra_info"]["index"]
        self.lengths = iter(self.task.lengths[index, row["rollout_n"]])
        return await super().run(sampling_params, **row)

    async def assistant_turn(self, trajectory, sampling_params):
        length = {"max_tokens": int(next(self.lengths))}
        await super().assistant_turn(trajectory, sampling_params | length)
        trajectory.stop_reason = "stop"
        return ""


def draw_lengths(options) -> np.ndarray:
    """Returns the tokens of turns, (prompts, group_size, turns)."""
    size = (options.prompts, options.group_size, options.turns)
    if not options.spread:
        return np.full(size, options.tokens)
    drawn = np.random.default_rng(0).exponential(options.tokens, size)
    return drawn.round().astype(int).clip(1, LONGEST * options.tokens)


def start(args: train.Args, lengths: np.ndarray) -> SimpleNamespace:
    """Returns what `rollout.rollout` needs of a train.Run."""
    engine, policy = common.engine_and_policy(args)
    train.sync(engine, policy, 0)
    task = SimpleNamespace(reward=calculator.reward, INTERACTIONS=[User()], lengths=lengths)
    return SimpleNamespace(
        engine=engine,
        task=task,
        tokenizer=AutoTokenizer.from_pretrained(args.model),
        args=args,
        processor=None,
        stop=SimpleNamespace(requested=False),
        background=Background(),
        store=dist.HashStore(),
    )


def time_rollout(run, rows: list[dict]) -> tuple[float, float]:
    """Returns the seconds of a rollout, and the share in which the engine was idle."""
    lengths = run.task.lengths
    run.engine.core.reset_prefix_cache()
    started = time.perf_counter()
    done = rollout(run, rows, next(STEPS), lengths.shape[1], dict(FORCED))
    seconds = time.perf_counter() - started
    assert not done.errors, done.errors
    assert done.statistics["tokens"] == lengths.sum()
    return seconds, done.metrics(run.engine)["throughput/idle_share"]


def time_generate(run, rows: list[dict]) -> float:
    """Returns the seconds of LLM.generate, called once a turn with all prompts."""
    from vllm import SamplingParams

    run.engine.core.reset_prefix_cache()
    lengths = run.task.lengths
    prompts = [render(run.tokenizer, row["prompt"]) for row in rows for _ in lengths[0]]
    said = [*rows[0]["prompt"], {"role": "assistant", "content": ""}]
    answer = [{"role": "user", "content": ANSWER}]
    suffix = chat_template(run.tokenizer).suffix(said, answer, stop=None)
    plain = FORCED | {"logprobs": 0, "detokenize": False}
    turns = []
    for of_turn in lengths.reshape(len(prompts), -1).T.tolist():
        turns.append([SamplingParams(**plain, max_tokens=n, seed=i) for i, n in enumerate(of_turn)])
    started = time.perf_counter()
    for of_turn in turns:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = run.engine.llm.generate(requests, of_turn, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            prompt += [*output.outputs[0].token_ids, *suffix]
    return time.perf_counter() - started


def main() -> None:
    """Builds a model if none is given, and an engine; measures."""
    numbers = dict(turns=1, prompts=16, group_size=8, tokens=64, rounds=5)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model")
    parser.add_argument("--spread", choices=["tail"], help="lengths of turns differ")
    options = parser.parse_args()
    lengths = draw_lengths(options)
    rows = calculator.load("train")[: options.prompts]
    ratios = []
    idle = []
    with tempfile.TemporaryDirectory() as folder:
        args = train.Args(
            model=options.model or common.random_model(folder, max_position_embeddings=1 << 15),
            agent="fixed_turns",
            max_assistant_turns=options.turns,
            max_response_tokens=options.turns * (LONGEST * options.tokens + 64),
        )
        run = start(args, lengths)
        for i in range(options.rounds + 1):
            ours, share = time_rollout(run, rows)
            theirs = time_generate(run, rows)
            ratios.append(theirs / ours)
            idle.append(share)
            print(f"round {i}: rollout {ours:.2f} s, generate {theirs:.2f} s", flush=True)
    del ratios[0], idle[0]  # the warm-up
    print(f"ratio {common.spread(ratios)}, the engine is idle for {median(idle):.1%} of a rollout")
    common.write_rows(options.out, [{"ratio": common.of_rounds(ratios), "idle": median(idle)}])


if __name__ == "__main__":
    main()
