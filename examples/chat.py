"""Talk to a policy in the terminal, with the tools, templates and engine of training.

    python examples/chat.py runs/calculator/final --task examples/calculator.py
    python examples/chat.py runs/calculator/final --eval_sampling_args '{"temperature": 1}'

You are the simulated user. An empty line starts another conversation, Ctrl-D ends the program. All
flags of train.py work. The policy samples as in an evaluation, by default greedily."""

import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train  # noqa: E402
from agent_loop import DEADLINE, Interaction, ToolAgentLoop, in_thread  # noqa: E402

FLAGS = ["--num_steps", "0", "--max_assistant_turns", "0"]


class Terminal(Interaction):
    """The user at the keyboard."""

    name = "terminal"

    async def start(self, request_id: str, **kwargs) -> str:
        """Returns what the user types. Raises EOFError at the end of the input."""
        DEADLINE.get().reschedule(None)  # people take their time
        return await in_thread(input, "you> ")

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Shows what the policy and its tools said, and asks the user; an empty line ends it."""
        show(messages)
        text = await self.start(request_id)
        return not text, text, None, None


def show(messages: list[dict]):
    """Prints the messages since the user's last one."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for message in messages[last + 1 :]:
        print(f"{message['role']}> {message['content']}")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            print(f"  {function['name']}({function['arguments']})")


def converse(run: train.Run):
    """Holds one conversation. The agent loop runs on the background thread, the engine here."""
    loop = ToolAgentLoop(run.engine, run.tokenizer, run.processor, run.task, run.args)
    first = run.rows["val"][0]["prompt"]
    prompt = [message for message in first if message["role"] == "system"]
    row = {"prompt": prompt, "step": 0, "index": 0, "rollout_n": 0, "validate": True}
    sampling = run.args.sampling(validate=True)

    future = run.background.submit(loop.run(sampling, **row))
    future.add_done_callback(lambda _: run.engine.poke())
    while not future.done():
        run.engine.step()

    outputs = future.result()
    output = outputs[-1] if isinstance(outputs, list) else outputs
    if output.stop_reason != "stop":
        show(output.messages)
        print(f"(this conversation ends here: {output.stop_reason})")


def main(argv: list[str]):
    """Loads the model and the task, and holds conversations until the input ends."""
    with tempfile.TemporaryDirectory() as folder:
        args = train.parse_args([*FLAGS, "--output_dir", folder, "--model", *argv])
        run = train.setup(args)
        run.log.listeners.clear()  # a conversation has no report
        run.task.INTERACTIONS = [Terminal()]
        try:
            with train.awake(run):
                while True:
                    converse(run)
        except EOFError:
            train.close(run)


if __name__ == "__main__":
    train.run_as_script(main, lambda: sys.argv[1:])
