"""Talk to a trained policy in the terminal, with the tools and the engine of training.

    python examples/chat.py runs/calculator/final --task examples/calculator.py
    python examples/chat.py runs/calculator/final --eval_sampling_args '{"temperature": 1}'

    you> What is 37*48?
      calculator({"expression": "37*48"})
      calculator> 1776
    policy> <answer>1776</answer>

You take the place of the simulated user. The task's SYSTEM_PROMPT and TOOLS are used, its
INTERACTIONS are not; the default --task is the calculator. A question of the task is shown first.
/new starts another conversation, Ctrl-D or /quit ends the program. All flags of
train.py work. The policy samples as in an evaluation, by default greedily. A conversation ends when
--max_response_tokens or --max_model_len are used up."""

import contextlib
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import data  # noqa: E402
from agent_loop import (  # noqa: E402
    DEADLINE,
    AgentLoopOutput,
    BadInput,
    Interaction,
    ToolAgentLoop,
    in_thread,
)
from flatrl import devices, models, terminal
from flatrl.vision import Vision


class Terminal(Interaction):
    """The user at the keyboard.

    command: "/new" or "/quit" if the user ended the conversation by it, else ""."""

    name = "terminal"

    def __init__(self):
        self.command = ""
        self.n_shown = 0  # messages that `show` has printed

    async def ask(self) -> str:
        """Returns what the user types next, or "" if that is a command."""
        text = ""
        while not text:
            try:
                text = (await in_thread(input, "you> ")).strip()
            except EOFError:
                text = "/quit"
        if text in ("/new", "/quit"):
            self.command = text
            return ""
        return text

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Shows the new messages and asks the user; returns (done, text, reward, metrics)."""
        DEADLINE.get().reschedule(None)  # people take their time
        self.show(messages)
        text = await self.ask()
        return not text, text, 0.0, {}

    def show(self, messages: list[dict]) -> None:
        """Prints the messages since the last call, except the user's own."""
        for message in messages[self.n_shown :]:
            if message["role"] == "assistant":
                if message.get("reasoning_content"):
                    print(f"  thinks> {message['reasoning_content'].strip()}")
                if message["content"]:
                    print(f"policy> {message['content']}")
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    arguments = json.dumps(function["arguments"], ensure_ascii=False)
                    print(f"  {function['name']}({arguments})")
            elif message["role"] == "tool":
                print(f"  {message['name']}> {message['content']}")
        self.n_shown = len(messages)


async def converse(engine, tokenizer, processor, task, args) -> list[AgentLoopOutput]:
    """Holds conversations until the user quits; returns their outputs."""
    outputs = []
    sampling = args.sampling(validate=True)
    system = getattr(task, "SYSTEM_PROMPT", None)
    while True:
        terminal = Terminal()
        text = await terminal.ask()
        if terminal.command == "/quit":
            return outputs
        if not text:
            continue
        task.INTERACTIONS = [terminal]
        prompt = [{"role": "system", "content": system}] if system else []
        prompt.append({"role": "user", "content": text})
        loop = ToolAgentLoop(engine, tokenizer, processor, task, args)
        row = {"prompt": prompt, "step": 0, "index": 0, "rollout_n": 0, "validate": True}
        result = await loop.run(sampling, **row)
        if not isinstance(result, list):
            result = [result]
        outputs += result
        terminal.show(result[-1].messages)
        if terminal.command == "/quit":
            return outputs
        if not terminal.command:
            print(f"(the conversation is over: {result[-1].stop_reason}; a new one starts)")


def talk(engine, background, *arguments) -> list[AgentLoopOutput]:
    """Runs `converse` on the background thread, while this one steps the awake engine.

    Returns its outputs."""
    future = background.submit(converse(engine, *arguments))
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def example(task, args) -> str:
    """Returns the question of the first validation row, or "" if there is none in words."""
    with contextlib.suppress(BadInput):  # to talk, no rows are needed
        rows = data.load_rows(task, "val", args.val_files, args.prompt_key, args.image_key)
        content = rows[0]["prompt"][-1]["content"] if rows and rows[0]["prompt"] else ""
        if isinstance(content, str):
            return " ".join(content.split())
    return ""


def read_arguments(argv: list[str]):
    """Returns train.py's flags for a conversation. Raises BadInput for wrong ones."""
    if not argv or argv[0].startswith("-"):
        raise BadInput("python examples/chat.py MODEL --task FILE, and any of train.py's flags")
    import train

    # Without training steps, the model may be in the very folder that training would write to.
    defaults = ["--num_steps", "0", "--task", str(Path(__file__).with_name("calculator.py"))]
    defaults += ["--max_assistant_turns", "0"]
    args = train.parse_args([*defaults, "--model", *argv])  # the last of a repeated flag counts
    args.max_user_turns = 0
    train.check_args(args)
    return args


def main(argv: list[str]) -> None:
    """Loads the model and the task, and talks. Raises BadInput for wrong arguments."""
    terminal.quiet_libraries()
    args = read_arguments(argv)
    import train
    from flatrl.processes import Background
    from flatrl.vllm_engine import check_model
    from rollout import Engine

    print(f"loading {args.model} and vLLM")
    task = data.load_task(args.task)
    accelerator, _ = devices.start_processes(args)
    train.complete_flags(args, accelerator.device.type == "cuda")
    tokenizer, processor = models.load_tokenizer(args)
    vocab_size = models.vocab_size(tokenizer)
    check_model(args, accelerator.device)
    vision = Vision(processor) if processor else None
    data.register_packed_attention()
    policy = train.Policy(args, vocab_size, vision)
    stops = models.stop_token_ids(args, tokenizer)
    image_token_id = vision.image_token_id if vision else None
    engine = Engine(args.model, args, accelerator.device, stops, vocab_size, image_token_id)
    train.sync(engine, policy, 0)
    background = Background()
    print("/new begins another conversation, Ctrl-D ends")
    print("a policy that has only seen one question in a conversation needs /new after each")
    question = example(task, args)
    if question:
        print(f"ask, for example: {question}")
    try:
        talk(engine, background, tokenizer, processor, task, args)
    finally:
        background.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        sys.exit(f"chat.py: {error}")
    except KeyboardInterrupt:
        pass
