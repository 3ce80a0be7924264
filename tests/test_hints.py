"""A row's hint: the policy as its own teacher. Exact, by the template of the rollout, and refused where it can't be."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, TINY, metrics_of, run
from test_agent_loop import ANSWER, END, PROMPT, SUM, Quiz, quiz_row, quiz_task
from test_rollout import hf_model
from test_templates import play
from test_thinking import OFF, thinker  # noqa: F401  (a fixture)

import data
import train
from agent_loop import AgentLoopOutput, BadInput, render, templated
from examples import calculator, hints
from flatrl.hints import require_hints, seen_by, tell, told_outputs, told_prompt
from flatrl.log import read_rollouts
from train import Args, check_args

SYSTEM, USER = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
ROW = {"prompt": [SYSTEM, USER], "hint": "It is 2.", "validate": False}
TOLD = [SYSTEM, {"role": "user", "content": "1+1?\n\nIt is 2."}]
SCHEMAS = [{"type": "function", "function": {"name": "calculator"}}]


def loop_of(tokenizer, **task):
    return SimpleNamespace(tokenizer=tokenizer, processor=None, task=SimpleNamespace(**task))


def output_of(prompt_ids: list[int], response_ids=(7, 8), mask=(1, 1), **extra) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=prompt_ids, response_ids=list(response_ids), response_mask=list(mask),
        response_logprobs=[-1.0 * m for m in mask], response_versions=[m - 1 for m in mask],
        extra={"prompt": 0, "sample": 0, "segment": 0, **extra})  # fmt: skip


# ---------------------------------------------------------------- what the teacher is told


def test_the_hint_is_a_paragraph_behind_the_last_message():
    assert told_prompt(ROW) == TOLD and ROW["prompt"] == [SYSTEM, USER]
    assert told_prompt(ROW, False) == told_prompt(ROW | {"hint": None}) == told_prompt({"prompt": [SYSTEM, USER]})
    parts = [{"type": "image"}, {"type": "text", "text": "1+1?"}]
    told = told_prompt({"prompt": [{"role": "user", "content": parts}], "hint": "2"})
    assert told == [{"role": "user", "content": [*parts, {"type": "text", "text": "\n\n2"}]}]


@pytest.mark.parametrize("row, said", [
    (ROW | {"hint": ["2"]}, r"row 0: 'hint' must be a text, got \['2'\]"),
    (ROW | {"prompt": [SYSTEM]}, "row 0: its 'hint' is told behind the last message of the prompt, which must be a"),
    (ROW | {"prompt": [USER, {"role": "assistant", "content": "Hm"}]}, "row 0: its 'hint' is told behind the last"),
])  # fmt: skip
def test_a_hint_that_cannot_be_told_is_refused_if_it_is_to_be(row, said, tokenizer):
    data.filter_overlong([row], tokenizer, SimpleNamespace(), Args(model="x"))
    with pytest.raises(BadInput, match=said):
        data.filter_overlong([row], tokenizer, SimpleNamespace(), Args(model="x", algo="opsd"))


def test_a_prompt_counts_with_its_hint(tokenizer):
    limit = len(render(tokenizer, TOLD))
    for algo, most, n in (("opsd", limit, 1), ("grpo", limit - 1, 1)):
        args = Args(algo=algo, max_prompt_tokens=most)
        assert len(data.filter_overlong([ROW], tokenizer, SimpleNamespace(), args)) == n
    with pytest.raises(BadInput, match="no prompt left"):
        args = Args(algo="opsd", max_prompt_tokens=limit - 1)
        data.filter_overlong([ROW], tokenizer, SimpleNamespace(), args)


@pytest.mark.parametrize("tools", [None, [calculator.calculator]])
def test_an_output_is_told_by_the_template_and_tools_of_its_rollout(tools, tokenizer):
    loop = loop_of(tokenizer, TOOLS=[calculator.calculator])
    schemas = None
    if tools:
        schemas = data.tool_schemas(ROW, loop.task)
    output = output_of(render(tokenizer, ROW["prompt"], schemas))
    tell(output, ROW, loop)
    assert output.extra["told_prompt_ids"] == render(tokenizer, TOLD, schemas) != output.prompt_ids
    for row in (ROW | {"hint": None}, ROW | {"validate": True}):
        output = output_of(output.prompt_ids)
        tell(output, row, loop)
        assert "told_prompt_ids" not in output.extra


def test_an_output_behind_a_rewritten_history_has_the_hint_in_its_place(thinker):  # noqa: F811
    """Qwen3's template, thinking off, forks at the tool call; what the engine saw of the fork has no empty block."""
    task = quiz_task(Quiz((True, "", 0.0, {})), calculator.calculator)
    outputs, engine = play(thinker, task, quiz_row(), [thinker.eos_token_id], SUM, ANSWER, chat_template_args=OFF)
    assert len(outputs) == 2
    row = {**quiz_row(), "prompt": PROMPT, "hint": "Look: 2", "validate": False}
    loop = SimpleNamespace(tokenizer=templated(thinker, OFF), processor=None, task=task)
    question = row["prompt"][-1]["content"]
    for output in outputs:
        tell(output, row, loop)
        plain, told = (thinker.decode(ids) for ids in (output.prompt_ids, output.extra["told_prompt_ids"]))
        assert plain.count(question + END) == 1
        assert told == plain.replace(question + END, f"{question}\n\nLook: 2{END}")


def test_a_prompt_of_the_loops_own_has_no_place_for_a_hint(tokenizer):
    output = output_of(render(tokenizer, [{"role": "user", "content": "Sum up."}]))
    with pytest.raises(ValueError, match="an output's prompt does not begin with its row's prompt"):
        tell(output, ROW, loop_of(tokenizer))


# ---------------------------------------------------------------- what the teacher says


def test_logprobs_ref_are_those_of_the_model_behind_the_hint(tiny_model, tokenizer, process_group):
    """Members of groups share their told prompts; a row without a hint is its own teacher; masked tokens have 0."""
    data.register_packed_attention()
    args = Args(model=tiny_model, dtype="float32", algo="opsd", temperature=0.7, tokens_per_micro_batch=80)
    outputs = []
    for prompt, sample in [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]:
        row = ROW | {"prompt": [SYSTEM, {"role": "user", "content": f"1+{prompt}?"}]}
        row["hint"] = None if prompt == 1 else f"It is {prompt}."
        response = tokenizer.encode(f"a{sample}, b{prompt}", add_special_tokens=False)
        mask = [1, 1, 0] + [1] * (len(response) - 3)
        output = output_of(render(tokenizer, row["prompt"]), response, mask, prompt=prompt, sample=sample)
        tell(output, row, loop_of(tokenizer))
        outputs.append(output)
    policy = train.Policy(args)
    batch = data.collate(outputs)
    assert seen_by("logprobs_old", batch) is batch and seen_by("logprobs_ref", batch) is batch["told"]
    found = train.score_tokens(policy, seen_by("logprobs_ref", batch), args)
    plain = train.score_tokens(policy, batch, args)
    model = hf_model(tiny_model)
    for row, output in enumerate(outputs):
        prompt = output.extra.get("told_prompt_ids", output.prompt_ids)
        ids = torch.tensor(prompt + output.response_ids)
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].detach()
        mask = torch.tensor(output.response_mask).bool()
        torch.testing.assert_close(found[row, : len(mask)][mask], expected[mask], atol=1e-5, rtol=0)
        assert (found[row, : len(mask)][~mask] == 0).all()
        assert torch.equal(found[row], plain[row]) == (output.extra["prompt"] == 1)
    # once graded, a batch is narrowed, and what was told with it
    kept = data.select(batch, [1, 3])
    assert kept["told"]["lengths"].tolist() == [batch["told"]["lengths"][1].item(), batch["lengths"][3].item()]
    assert told_outputs([outputs[3]]) == [] and "told" not in data.collate([outputs[3]])


def test_a_run_learns_what_the_hint_makes_likelier(cache, tmp_path):
    """Real vLLM: advantages are log pi(token | told) - log pi(token), and no reference model is loaded."""
    (tmp_path / "told.py").write_text(
        f"import sys; sys.path.insert(0, {str(REPO / 'tests')!r})\n"
        "import tiny_task\nfrom tiny_task import build_model, reward\n"
        "def load(split):\n    rows = tiny_task.load(split)\n"
        "    return [r | {'hint': 'Say 7.' if i % 2 else None} for i, r in enumerate(rows)]\n"
    )
    flags = [*TINY, "--task", tmp_path / "told.py", "--algo", "opsd", "--num_steps", "2", "--eval_every", "0"]
    run(*flags, "--max_prompt_tokens", "48", "--output_dir", tmp_path / "run", cache=cache)
    model = hf_model(json.loads((tmp_path / "run/args.json").read_text())["args"]["model"])
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    learned = (tmp_path / "run/learned/step_000001.jsonl").read_text().splitlines()
    told = 0
    for line, update in zip(map(json.loads, lines), map(json.loads, learned), strict=True):
        sampled = torch.tensor(line["response_mask"]).bool()
        of = []
        for prompt in (line["prompt_ids"], line["extra"].get("told_prompt_ids", line["prompt_ids"])):
            ids = torch.tensor(prompt + line["response_ids"])
            logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1).detach()
            of.append(logprobs.gather(1, ids[len(prompt) :, None])[:, 0][sampled])
        advantage = torch.tensor(update["advantage"]).expand(len(of[0]))
        torch.testing.assert_close(advantage, of[1] - of[0], atol=2e-5, rtol=0)
        told += "told_prompt_ids" in line["extra"]
        assert ("told_prompt_ids" in line["extra"]) == bool(advantage.abs().max() > 1e-4)
    assert 0 < told < len(lines)
    replayed, _ = read_rollouts(tmp_path / "run/rollouts/step_000001.jsonl", 10**6)
    assert len(replayed) == len(lines) and "told" not in data.collate(replayed)  # another teacher is told nothing
    first = metrics_of(tmp_path / "run")[1]
    assert abs(first["actor/kl"]) > 1e-3 and first["actor/grad_norm"] > 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("flags, said", [
    ({"algo": "opsd", "ref_model": "x"}, "--ref_model has an effect only without --hints"),
    ({"algo": "opsd", "replay": "x"}, "--replay has an effect only without --hints"),
    ({"hints": True}, "--hints has an effect only with a --kl_coef"),
])  # fmt: skip
def test_flags_that_do_not_go_with_hints(flags, said):
    with pytest.raises(BadInput) as error:
        check_args(Args(**flags))
    assert said in str(error.value)


def test_without_any_hint_there_is_nothing_to_learn(cache, tmp_path):
    printed = run(*TINY, "--algo", "opsd", "--output_dir", tmp_path / "run", code=2, cache=cache)
    said = "train.py: error: --hints (--algo opsd) learns from what a row's 'hint' tells: no training row has one"
    assert printed.strip().splitlines()[-1] == said and not (tmp_path / "run").exists()
    require_hints(Args(algo="opsd"), [{"prompt": []}, ROW])


def test_the_examples_rows_have_hints(tokenizer):
    rows = data.load_rows(hints, "train")
    question = rows[0]["prompt"][-1]["content"]
    assert told_prompt(rows[0])[-1]["content"] == f"{question}\n\nCall {question[8:-1]}."
