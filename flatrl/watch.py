"""Five warnings about faults that spoil a training, each printed once: docs/running.md#warnings."""

from collections import Counter, deque

from agent_loop import numeric_entries, total_reward
from flatrl.log import Listener, Log

FEW_CALLS = 5  # of a tool, before its exceptions are judged
MIN_ENTROPY = 3e-4
MAX_ROLLOUT_KL = 0.1  # per token, from the policies that sampled to the one that learns
FAR_STEPS = 3  # with a larger KL, before it is named
# A tool call has one of these, in the formats of vLLM's parsers.
CALL_MARKS = ["<tool_call", "[TOOL_CALLS]", "<function", "<|python_tag|>", '"arguments"']


class Watch(Listener):
    """Warns of each problem in the first step that has it."""

    def __init__(self, log: Log):
        super().__init__(log)
        self.named = set()  # the problems that were named
        self.kls = deque(maxlen=FAR_STEPS)  # rollout/kl of the last steps

    def metrics(self, row, rollouts=None, batch=None):
        if not batch:
            return
        self.kls.append(row.get("rollout/kl", 0.0))
        problems = self.of_policy(row) | self.of_outputs(rollouts.trained)
        for name in [name for name in problems if name not in self.named]:
            where = f"({name.split()[0]}: docs/running.md#warnings)"
            self.log.warn(f"step {row['step']}: {problems[name]} {where}")
        self.named |= problems.keys()

    def of_policy(self, row: dict) -> dict[str, str]:
        """Returns the problems of a step's metrics, and of the KL of the last steps, by name."""
        problems = {}
        if row.get("actor/entropy", 1.0) < MIN_ENTROPY:
            problems["entropy"] = "the entropy is nearly 0: rollouts of a prompt will be equal"
        if len(self.kls) == FAR_STEPS and min(self.kls) > MAX_ROLLOUT_KL:
            so_far = f"has been above {MAX_ROLLOUT_KL} for {FAR_STEPS} steps"
            problems["rollout/kl"] = f"rollout/kl is {self.kls[-1]:.2g} a token, and {so_far}"
        return problems

    def of_outputs(self, outputs: list) -> dict[str, str]:
        """Returns the problems of the outputs that a step trained, by name."""
        problems = {}
        best = max(map(total_reward, outputs))
        cut_off = [output.truncated for output in outputs if total_reward(output) == best]
        if best > 0 and sum(cut_off) > len(cut_off) / 2:
            answers = f"{sum(cut_off)} of the {len(cut_off)} best-paid answers"
            problems["truncated"] = f"{answers} were cut off by a limit"

        n_unparsed = 0
        totals = Counter()
        for output in outputs:
            has_mark = any(mark in output.text for mark in CALL_MARKS)
            n_unparsed += has_mark and output.metrics.get("tool_calls") == 0
            totals.update(numeric_entries(output.metrics))
        if n_unparsed > len(outputs) / 2:
            answers = f"{n_unparsed} answers look like tool calls, and none was parsed in them"
            problems["parser"] = f"{answers}: is --tool_parser {self.log.args.tool_parser} right?"

        for name, n_raised in totals.items():
            kind, _, tool = name.partition("/")
            n_calls = totals[f"tool_calls/{tool}"]
            if kind == "tool_exceptions" and n_calls >= FEW_CALLS and n_raised >= n_calls / 2:
                raised = f"raised in {n_raised} of its {n_calls} calls"
                problems[f"tools {tool}"] = f"the tool {tool!r} {raised}"
        return problems
