"""examples/gsm8k.py, gsm8k_user.py and game.py: rewards by value, and whole trajectories against a scripted engine."""

import asyncio
import json
import math
import random
import re
import threading
import time
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANGS, for_ever, rewards_of_tokens, time_passes
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop import TokenOutput, ToolAgentLoop, agent_loop_class
from data import filter_overlong, load_rows, load_task, turn_states
from examples import calculator
from rollout import score
from train import Args

EXAMPLES = Path(__file__).parents[1] / "examples"
gsm8k, gsm8k_user, game = (load_task(str(EXAMPLES / f"{name}.py")) for name in ("gsm8k", "gsm8k_user", "game"))

END = "<|im_end|>"


def user_turn(text: str) -> str:
    return f"\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


@dataclass
class Script:
    """An engine that says its lines; an exception is raised, a pair is (text without end of turn, stop reason).

    `hold`, if set, is awaited before every line: a way to keep one trajectory waiting while another goes on.
    """

    tokenizer: object
    lines: tuple
    hold: object = None
    calls: int = 0
    request_ids: set[str] = field(default_factory=set)

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        assert self.calls < len(self.lines), "the loop asked for more turns than the script has"
        line = self.lines[self.calls]
        self.calls += 1
        self.request_ids.add(request_id)
        await (self.hold() if self.hold else asyncio.sleep(0))
        if isinstance(line, Exception):
            raise line
        text, reason = (line + END, "stop") if isinstance(line, str) else line
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return TokenOutput(ids, [-0.5] * len(ids), [0] * len(ids), reason, list(prompt_ids))


@pytest.fixture(scope="module")
def prepare(tokenizer):
    """prepare(task, row, lines, hold=, **args) -> (a coroutine that plays and scores the trajectory, its engine)."""

    def prepare(task, row, lines, hold=None, **args):
        args = Args(**{"max_response_tokens": 1000, "tool_timeout": 4 * HANGS} | args)
        engine = Script(tokenizer, tuple(lines), hold)
        cls = agent_loop_class(row, task, args)
        assert cls is ToolAgentLoop

        async def run():
            output = await cls(engine, tokenizer, None, task, args).run({}, **row, step=0, rollout_n=0, validate=False)
            await score(task, [output], row)
            return output

        return run(), engine

    return prepare


@pytest.fixture(scope="module")
def play(prepare):
    def play(task, row, *lines, **how):
        return asyncio.run(prepare(task, row, lines, **how)[0])

    return play


def rewards_of_turns(output) -> list[float]:
    """The reward of each assistant turn, 0.0 where it has none; fails if one is anywhere but on a turn's last token."""
    mask = output.response_mask
    ends = [i for i, m in enumerate(mask) if m and (i + 1 == len(mask) or not mask[i + 1])]
    given = dict(output.turn_rewards)
    assert len(given) == len(output.turn_rewards) and set(given) <= set(ends)
    batch = rewards_of_tokens([output])[0].tolist()  # where the trainer puts them; the task's own comes on top
    terminal = output.reward["score"] if isinstance(output.reward, dict) else output.reward
    for i, reward in enumerate(batch):
        assert reward == pytest.approx(given.get(i, 0.0) + (terminal if i == ends[-1] else 0.0))
    return [given.get(end, 0.0) for end in ends]


# ---------------------------------------------------------------------------------------------------------------------
# Every example: what train.py does with it before the first rollout


@pytest.mark.parametrize("task", [gsm8k, gsm8k_user, game], ids=lambda task: task.__name__)
def test_rows_are_fixed_disjoint_and_fit_the_tiny_model(task, tokenizer):
    train, val = load_rows(task, "train"), load_rows(task, "val")
    assert train == load_rows(task, "train")
    assert train[0]["prompt"][0] == {"role": "system", "content": task.SYSTEM_PROMPT}
    for rows in (train, val):
        assert filter_overlong(rows, tokenizer, task, Args(model="x", max_model_len=640)) == rows
    key = "seed" if task is game else "question"

    def keys(rows):
        return [
            (row["extra_info"].get("interaction_kwargs") or {}).get(key) or row["extra_info"].get(key) for row in rows
        ]

    assert len(set(keys(train)) | set(keys(val))) == len(train) + len(val)
    assert callable(task.build_model)
    with pytest.raises(KeyError):
        task.load("test")


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K: the data, and the number in a text


def test_the_bundled_problems_are_right():
    problems = [json.loads(line) for line in gsm8k.DATA.read_text().splitlines()]
    assert len(problems) == 24 and all(set(problem) == {"question", "answer"} for problem in problems)
    for problem in problems:
        steps = re.findall(r"<<(.+?)=(-?[0-9.]+)>>", problem["answer"])
        assert steps
        for expression, value in steps:  # GSM8K's own notation of what a calculator says
            assert Decimal(calculator.calculator(expression)) == Decimal(value), problem
        assert gsm8k.find_answer(problem["answer"]) == Decimal(steps[-1][1])
    truths = [row["reward_model"]["ground_truth"] for row in gsm8k.load("train") + gsm8k.load("val")]
    assert truths == [str(gsm8k.find_answer(problem["answer"])) for problem in problems]
    assert (truths[8], truths[19], truths[23]) == ("60000", "-4", "2000")  # "60,000", "-4", "2,000"


@pytest.mark.parametrize("text, number", [
    ("#### 72", "72"),
    ("####72", "72"),
    ("so\n####  72\n", "72"),
    ("#### 72 apples, not 80", "72"),
    ("#### 72.", "72"),
    ("#### 12%", "12"),
    ("#### 1,234,567", "1234567"),
    ("#### $1,234.50", "1234.50"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### +5", "5"),
    ("#### .5", "0.5"),
    ("#### 5,", "5"),
    ("<answer>72</answer>", "72"),
    ("<answer> $1,072 in all </answer>", "1072"),
    ("#### <answer>72</answer>", "72"),  # verl's interaction prompts say "#### <answer>"
    ("#### 1. Count them\n#### 2. Add them\n#### 30", "30"),  # headings
    ("#### 70\nNo, wait.\n#### 72", "72"),
    ("<answer>70</answer> <answer>72</answer>", "72"),
    ("<answer>70</answer> #### 72", "72"),
    ("#### 72 <answer>70</answer>", "70"),
    ("#### 72\n####", "72"),
    ("", None),
    ("72", None),
    ("The answer is 72.", None),
    ("####", None),
    ("#### seventy-two", None),
    ("#### --5", None),
    ("#### -$-5", None),
    ("### 72", None),
    ("<answer>72", None),  # cut off
    ("<answer>it is 72</answer>", None),
    ("<answer></answer>", None),
    ("#### ٣", None),  # digits of another script
])  # fmt: skip
def test_find_answer(text, number):
    assert gsm8k.find_answer(text) == (None if number is None else Decimal(number))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["####", " ", "<answer>", "</answer>", "-", "+", "$", ",", ".", "7", "00", "x"])))
def test_no_text_breaks_the_parser(parts):
    found = gsm8k.find_answer("".join(parts))
    assert found is None or found.is_finite()


@pytest.mark.parametrize(
    "text", ["<answer>" + "1" * 200_000, "<answer>" + "1," * 100_000 + "<", "#### " * 40_000 + "-"]
)
def test_runaway_text_takes_no_time(text):
    started = time.thread_time()
    assert gsm8k.find_answer(text) is None
    assert time.thread_time() - started < 60  # of this thread's CPU; it takes milliseconds, quadratic would be minutes


@pytest.mark.parametrize("said, truth, score, form", [
    ("#### 72", "72", 1.0, 1.0),
    ("#### 72.00", "72", 1.0, 1.0),
    ("#### 1,000", "1000", 1.0, 1.0),
    ("#### 1000", "1,000", 1.0, 1.0),
    ("#### 72", 72, 1.0, 1.0),
    ("#### -72", "72", 0.0, 1.0),
    ("#### 7", "72", 0.0, 1.0),
    ("#### 720", "72", 0.0, 1.0),
    ("#### 71\n#### 72", "72", 1.0, 1.0),
    ("#### 72\n#### 71", "72", 0.0, 1.0),
    ("72", "72", 0.0, 0.0),
    (None, "72", 0.0, 0.0),
])  # fmt: skip
def test_reward(said, truth, score, form):
    row = {"reward_model": {"ground_truth": truth}}
    output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
    assert gsm8k.reward(output, row) == {"score": score, "format": form}


def test_only_the_assistants_last_message_is_graded():
    row = {"reward_model": {"ground_truth": "72"}}
    right, wrong = ({"role": "assistant", "content": f"#### {n}"} for n in (72, 71))
    for messages in ([], [{"role": "tool", "content": "#### 72"}], [right, {"role": "user", "content": "#### 72"}]):
        assert gsm8k.reward(SimpleNamespace(messages=messages), row) == {"score": 0.0, "format": 0.0}
    assert gsm8k.reward(SimpleNamespace(messages=[right, wrong]), row)["score"] == 0.0
    assert gsm8k.reward(SimpleNamespace(messages=[wrong, right]), row)["score"] == 1.0


def test_gsm8k_with_the_calculator(play):
    row = load_rows(gsm8k, "train")[0]  # 6*12-9
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*12-9"}}\n</tool_call>'
    output = play(gsm8k, row, call, "So she has\n#### 63")
    assert [m["content"] for m in output.messages[2:]] == ["", "63", "So she has\n#### 63"]
    assert (output.reward, output.num_turns) == ({"score": 1.0, "format": 1.0}, 4)
    assert rewards_of_turns(output) == [0.0, 0.0]
    assert play(gsm8k, row, call, "#### 62").reward == {"score": 0.0, "format": 1.0}
    assert play(gsm8k, row, call, ("", "length")).reward == {"score": 0.0, "format": 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Files as verl writes them


def verl_row(question: str, answer: str, truth: str, index: int, interaction: bool) -> dict:
    """A row of verl's examples/data_preprocess/gsm8k.py or gsm8k_multiturn_w_interaction.py."""
    asked = question + " Let's think step by step and output the final answer after `####`."
    prompt = [{"role": "user", "content": asked}]
    extra = {"split": "train", "index": index, "answer": answer, "question": question}
    if interaction:
        prompt.insert(0, {"role": "system", "content": "You are a math expert."})
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": asked, "ground_truth": truth}
    return {"data_source": "openai/gsm8k", "prompt": prompt, "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": extra}  # fmt: skip


@pytest.fixture
def parquet(tmp_path):
    def parquet(interaction: bool) -> list[str]:
        datasets = pytest.importorskip("datasets")
        rows = [verl_row("What is 1+1?", "1+1\n#### 2", "2", 0, interaction)]
        rows += [verl_row("What is 1-1001?", "1-1001\n#### -1,000", "-1000", 1, interaction)]
        file = str(tmp_path / "train.parquet")
        datasets.Dataset.from_list(rows).to_parquet(file)
        return [file]

    return parquet


def test_verls_gsm8k_parquet(parquet, play, tokenizer):
    rows = load_rows(gsm8k, "train", parquet(interaction=False))
    assert [row["index"] for row in filter_overlong(rows, tokenizer, gsm8k, Args(model="x"))] == [0, 1]
    assert rows[0]["prompt"][0] == {"role": "system", "content": gsm8k.SYSTEM_PROMPT}
    assert play(gsm8k, rows[1], "#### -1,000").reward == {"score": 1.0, "format": 1.0}


def test_verls_interaction_parquet(parquet, play, tokenizer):
    rows = load_rows(gsm8k_user, "train", parquet(interaction=True))
    assert filter_overlong(rows, tokenizer, gsm8k_user, Args(model="x")) == rows
    assert rows[0]["prompt"][0]["content"] == "You are a math expert."  # a row's own system message stays
    output = play(gsm8k_user, rows[1], "#### 1000", "#### -1000")
    assert rewards_of_turns(output) == [0.0, 1 / 2]


def test_rows_without_a_ground_truth_for_the_user_say_so(parquet, play):
    rows = load_rows(gsm8k_user, "train", parquet(interaction=False))  # the file of the other example
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'ground_truth'"):
        play(gsm8k_user, rows[0], "#### 2")
    assert gsm8k_user.INTERACTIONS[0].tries == {}


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K with a user

WRONG, NO_ANSWER = "That is wrong. Try again.", 'I see no answer. End with "#### N".'


@pytest.fixture
def user():
    (user,) = gsm8k_user.INTERACTIONS
    assert user.tries == {}  # every test before left nothing behind
    return user


def problem() -> dict:
    return load_rows(gsm8k_user, "train")[0]  # 63


@pytest.mark.parametrize("lines, replies, rewards, right", [
    (["#### 63"], [], [1.0], 1.0),
    (["<answer>63</answer>"], [], [1.0], 1.0),
    (["#### 62", "#### 63"], [WRONG], [0.0, 1 / 2], 1.0),
    (["hm", "#### 62", "#### 63"], [NO_ANSWER, WRONG], [0.0, 0.0, 1 / 3], 1.0),
    (["#### 60", "#### 61", "#### 62"], [WRONG, WRONG], [0.0, 0.0, 0.0], 0.0),
    (["", "#### 63"], [NO_ANSWER], [0.0, 1 / 2], 1.0),
    (["#### 63 is it?"], [], [1.0], 1.0),
])  # fmt: skip
def test_the_user_answers_and_pays_by_turn(play, user, lines, replies, rewards, right):
    output = play(gsm8k_user, problem(), *lines)
    assert [m["content"] for m in output.messages if m["role"] == "user"][1:] == replies
    assert rewards_of_turns(output) == pytest.approx(rewards)
    assert output.reward == {"score": 0.0, "right": right}
    assert output.stop_reason == "stop"  # three wrong answers are an end, not a cut
    assert output.metrics["interaction/tries"] == len(lines)
    assert output.metrics.get("interaction/right", 0) == right
    assert user.tries == {}


def test_the_tokens_of_a_second_try(play, tokenizer, user):
    output = play(gsm8k_user, problem(), "#### 62", "#### 63")
    assert tokenizer.decode(output.response_ids) == f"#### 62{END}{user_turn(WRONG)}#### 63{END}"
    assert output.turn_rewards == [(len(output.response_ids) - 1, 1 / 2)]


def test_a_turn_that_was_cut_off_is_not_judged(play, user):
    output = play(gsm8k_user, problem(), ("#### 63", "length"))
    assert (output.turn_rewards, output.stop_reason, user.tries) == ([], "length", {})


@pytest.mark.parametrize("lines", [[RuntimeError("engine")], ["#### 1", RuntimeError("engine")]])
def test_the_users_state_is_dropped_when_the_trajectory_fails(play, user, lines):
    with pytest.raises(RuntimeError, match="engine"):
        play(gsm8k_user, problem(), *lines)
    assert user.tries == {}


def in_turn(number: int, barrier: asyncio.Barrier):
    """A `hold` that makes trajectories alternate: all reach their next line before any says it."""

    async def hold():
        await barrier.wait()
        for _ in range(10 * number):
            await asyncio.sleep(0)

    return hold


def test_two_trajectories_of_one_user_do_not_share_tries(prepare, user):
    async def scenario():
        barrier = asyncio.Barrier(2)
        first, engine = prepare(gsm8k_user, problem(), ["#### 1", "#### 2", "#### 3"], in_turn(0, barrier))
        second, other = prepare(gsm8k_user, problem(), ["#### 1", "#### 2", "#### 63"], in_turn(1, barrier))
        outputs = await asyncio.gather(first, second)
        assert engine.request_ids.isdisjoint(other.request_ids)
        return outputs

    one, two = asyncio.run(scenario())
    assert (rewards_of_turns(one), rewards_of_turns(two)) == ([0, 0, 0], [0, 0, pytest.approx(1 / 3)])
    assert user.tries == {}


# ---------------------------------------------------------------------------------------------------------------------
# The game

SAY_ONE = "Illegal: say one <answer>N</answer>."


def guess(number: int) -> str:
    return f"<answer>{number}</answer>"


def hunt(low=1, high=8, secret=6, **kwargs) -> dict:
    """A row for a game whose secret is known: the first seed that has it."""
    for seed in range(10_000):
        env = game.NumberHunt(low, high)
        env.reset(seed)
        if env.secret == secret:
            break
    kwargs = {"name": "number_hunt", "seed": seed, "low": low, "high": high, **kwargs}
    return {"prompt": [], "extra_info": {"interaction_kwargs": kwargs}}


def test_the_environment_alone():
    env, again = game.NumberHunt(), game.NumberHunt()
    assert env.reset(5) == again.reset(5) == "Find my number from 10 to 99."
    assert env.secret == again.secret
    assert {game.NumberHunt().reset(s) for s in range(9)} == {"Find my number from 10 to 99."}
    env = game.NumberHunt(1, 8)
    env.reset(0)
    env.secret = 6
    eighth = math.log(8)
    for action, said, earned, done, info in [
        (4, "Higher: 5-8.", math.log(8 / 4) / eighth, False, {"won": 0, "guesses": 1}),
        (8, "Lower: 5-7.", math.log(4 / 3) / eighth, False, {"won": 0, "guesses": 1}),
        (6, "Found!", math.log(3) / eighth, True, {"won": 1, "guesses": 1}),
    ]:
        observation, reward, ended, notes = env.step(f"I think {guess(action)}.")
        assert (observation, ended, notes) == (said, done, info)
        assert reward == pytest.approx(earned - 0.05)


@pytest.mark.parametrize("action", ["", "6", guess(9), guess(0), guess(-6), guess(5) + guess(6), "<answer>x</answer>",
                                    "<answer>6.5</answer>", f"<answer>{'6' * 5000}</answer>"])  # fmt: skip
def test_an_illegal_action_changes_nothing(action):
    env = game.NumberHunt(1, 8)
    env.reset(0)
    before = dict(vars(env))
    with pytest.raises(game.IllegalAction):
        env.step(action)
    assert vars(env) == before


@pytest.mark.parametrize("seed", range(5))
def test_any_won_game_earns_the_same_but_for_its_turns(seed):
    for strategy in (lambda low, high: (low + high) // 2, lambda low, high: low, lambda low, high: high):
        env = game.NumberHunt(turns=100)
        env.reset(seed)
        total, turns, done = 0.0, 0, False
        while not done:
            _, reward, done, _ = env.step(guess(strategy(env.low, env.high)))
            total, turns = total + reward, turns + 1
        assert total == pytest.approx(1 - 0.05 * turns)


def test_bisection_wins_every_bundled_game():
    for row in game.load("val") + game.load("train")[:100]:
        env = game.NumberHunt()
        env.reset(row["extra_info"]["interaction_kwargs"]["seed"])
        done = False
        while not done:
            *_, done, info = env.step(guess((env.low + env.high) // 2))
        assert info["won"]


@pytest.fixture
def envs():
    (interaction,) = game.INTERACTIONS
    assert interaction.envs == {}
    return interaction.envs


def test_a_game_to_its_end(play, tokenizer, envs):
    output = play(game, hunt(), guess(4), "six?", guess(9), guess(6), max_response_tokens=200)
    given = [user_turn(said) for said in ("Higher: 5-8.", SAY_ONE, "Illegal: 9 is not in 5-8.")]
    sampled = [text + END for text in (guess(4), "six?", guess(9), guess(6))]
    assert tokenizer.decode(output.response_ids) == "".join(a + b for a, b in zip(sampled, [*given, ""]))
    eighth = math.log(8)
    earned = [math.log(2) / eighth - 0.05, -0.1, -0.1, math.log(4) / eighth - 0.05]
    assert rewards_of_turns(output) == pytest.approx(earned)
    mask = output.response_mask
    ends = [at for at, sampled in enumerate(mask) if sampled and not any(mask[at + 1 : at + 2])]
    assert [at for at, _ in output.turn_rewards] == ends and len(ends) == 4
    assert (output.reward, output.stop_reason, output.num_turns) == (0.0, "stop", 8)
    metrics = {"interaction/won": 1, "interaction/guesses": 2, "interaction/illegal": 2}
    assert {name: output.metrics[name] for name in metrics} == metrics
    assert envs == {}


def test_the_state_of_a_turn_is_the_interval_that_the_user_named(play, envs):
    output = play(game, hunt(), guess(4), guess(9), guess(6), max_response_tokens=200)
    output.extra = {"prompt": 0, "sample": 0}
    states = ["Find my number from 1 to 8.", "Higher: 5-8.", "Illegal: 9 is not in 5-8."]
    assert output.metrics["states"] == states
    assert len(set(turn_states([output], [3]).tolist())) == 3


def test_a_beginners_games_are_legal_half_of_the_time_and_end():
    random.seed(0)
    chats = [game.demonstration(seed) for seed in range(100, 300)]
    said = [message["content"] for chat in chats for message in chat[2:] if message["role"] == "user"]
    illegal = sum(text.startswith("Illegal") for text in said) / len(said)
    assert 0.2 < illegal < 0.5 and not any("say one" in text for text in said)
    assert {chat[-1]["role"] for chat in chats} <= {"assistant", "user"} and max(map(len, chats)) == 2 + 2 * 8
    assert all([m["role"] for m in chat[2::2]] == ["assistant"] * len(chat[2::2]) for chat in chats)


def test_a_lost_game_ends_too(play, envs):
    output = play(game, hunt(turns=2), guess(1), guess(8))
    assert (output.stop_reason, output.metrics["interaction/won"]) == ("stop", 0)
    assert len(rewards_of_turns(output)) == 2
    assert envs == {}


@pytest.mark.parametrize("limit", ["max_assistant_turns", "max_user_turns"])
def test_only_illegal_actions_end_at_a_limit(play, envs, limit):
    output = play(game, hunt(), *["?"] * 4, **{"max_assistant_turns": 0, limit: 3})
    assert output.stop_reason == "max_turns"
    assert rewards_of_turns(output)[:2] == [-0.1, -0.1]
    assert envs == {}


def test_two_interleaved_games_have_environments_of_their_own(prepare, envs):
    seen = []

    async def scenario():
        barrier = asyncio.Barrier(2)
        first, engine = prepare(game, hunt(secret=6), [guess(4), guess(6)], in_turn(0, barrier))
        second, other = prepare(game, hunt(secret=2), [guess(4), guess(2)], in_turn(1, barrier))
        both = asyncio.gather(first, second)
        while len(envs) < 2:
            await asyncio.sleep(0)
        seen.extend(envs.values())
        assert set(envs) >= engine.request_ids | other.request_ids
        return await both

    one, two = asyncio.run(scenario())
    assert [m["content"] for m in one.messages if m["role"] == "user"][1:] == ["Higher: 5-8."]
    assert [m["content"] for m in two.messages if m["role"] == "user"][1:] == ["Lower: 1-3."]
    assert [out.metrics["interaction/won"] for out in (one, two)] == [1, 1]
    assert seen[0] is not seen[1] and envs == {}


# ---------------------------------------------------------------------------------------------------------------------
# The adapter, with environments that are slow, broken or hold something


class Room:
    """An environment whose steps are functions, and which writes down what happens."""

    def __init__(self, log: list, *steps, make=None):
        self.log, self.steps = log, list(steps)
        if make:
            make()

    def reset(self, seed):
        self.log.append(("reset", seed))
        return "start"

    def step(self, action):
        self.log.append(("step", action, threading.current_thread() is threading.main_thread()))
        return self.steps.pop(0)()

    def close(self):
        self.log.append("close")


def room(log, *steps, slow=False, **how) -> tuple[SimpleNamespace, dict]:
    interaction = game.EnvInteraction("room", lambda **kwargs: Room(log, *steps, **how), slow=slow)
    row = {"prompt": [], "extra_info": {"interaction_kwargs": {"name": "room", "seed": 3}}}
    return SimpleNamespace(INTERACTIONS=[interaction], reward=game.reward), row


def fail(error: BaseException):
    raise error


@pytest.mark.parametrize("slow", [False, True])
def test_an_environments_life(play, slow):
    log = []
    steps = [lambda: ("go on", 0.25, False, {"steps": 1, "note": "no number"}), lambda: fail(game.IllegalAction("no."))]
    steps += [lambda: ("bye", 1, True, {"steps": 1})]
    task, row = room(log, *steps, slow=slow)
    output = play(task, row, " a ", "b", "c")
    assert log == [("reset", 3), ("step", " a ", not slow), ("step", "b", not slow), ("step", "c", not slow), "close"]
    assert rewards_of_turns(output) == [0.25, -0.1, 1.0]
    assert [m["content"] for m in output.messages if m["role"] == "user"] == ["start", "go on", "Illegal: no."]
    assert {k: v for k, v in output.metrics.items() if k.startswith("interaction/")} == {
        "interaction/steps": 2, "interaction/illegal": 1,
    }  # fmt: skip
    assert task.INTERACTIONS[0].envs == {}


@pytest.mark.parametrize("slow", [False, True])
def test_an_environments_own_error_is_no_illegal_action(play, slow):
    log = []
    task, row = room(log, lambda: int("x"), slow=slow)
    with pytest.raises(ValueError, match="invalid literal"):
        play(task, row, "a")
    assert log[-1] == "close" and task.INTERACTIONS[0].envs == {}


def test_an_environment_that_can_not_be_made(play):
    task, row = room([], make=lambda: fail(OSError("no such level")))
    with pytest.raises(OSError, match="no such level"):
        play(task, row)
    assert task.INTERACTIONS[0].envs == {}


def test_a_step_that_hangs_ends_its_trajectory_and_no_other(prepare):
    log, stepping, release = [], threading.Event(), threading.Event()
    task, row = room(log, lambda: stepping.set() or release.wait(), slow=True)
    fine, fine_row = room([], lambda: ("bye", 1.0, True, {}), slow=True)

    async def scenario():
        hangs, _ = prepare(task, row, ["a"], tool_timeout=HANGS)
        ends, _ = prepare(fine, fine_row, ["a"])
        hanging = asyncio.create_task(hangs)
        output = await ends
        while not stepping.is_set():
            await asyncio.sleep(0)
        assert not hanging.done()
        time_passes()
        with pytest.raises(TimeoutError):
            await hanging
        return output

    try:
        assert rewards_of_turns(asyncio.run(scenario())) == [1.0]
    finally:
        release.set()
    assert log[-1] == "close" and task.INTERACTIONS[0].envs == {}


def test_a_cancelled_game_is_closed(prepare):
    log = []
    task, row = room(log, lambda: ("go on", 0.0, False, {}))

    async def scenario():
        waiting = asyncio.Event()

        async def hold():
            if len(log) == 2:  # reset and one step: the second turn is never said
                waiting.set()
                await for_ever()

        playing = asyncio.create_task(prepare(task, row, ["a", "b"], hold)[0])
        await waiting.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(scenario())
    assert log[-1] == "close" and task.INTERACTIONS[0].envs == {}
