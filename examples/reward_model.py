r"""Reward by a Hugging Face reward model: a sequence classifier with one label.

    accelerate launch train.py --task examples/reward_model.py        # it runs, with RANDOM rewards
    export RM_MODEL=Skywork/Skywork-Reward-V2-Qwen3-0.6B
    accelerate launch train.py --task examples/reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train_files train.parquet --val_files test.parquet          # column prompt

The model lives in host memory, one copy for each rank. Outputs to score arrive one by one on the
agent loops' thread; a thread of the model's own collects those of a few milliseconds and scores
them as one padded batch. A conversation longer than the model's window loses its beginning. The
reward is the raw logit; `--reward_clip` bounds it. A score's last digits depend on what it is
batched with, so runs with `--deterministic` repeat only up to those.

RM_DEVICE=cpu, the default, scores where the model lives, on cores that the engine leaves idle:
right for a small model. RM_DEVICE=cuda moves the model to the rank's GPU for each batch and back,
on a stream of its own. That breaks the rule that every CUDA call is made on the main thread: the
core has no hook for it yet. The model shares no tensor with the trainer or the engine, and a
rollout phase awaits its rewards before the engine sleeps. But there must be memory for it beside
the awake engine (lower `--gpu_memory_utilization`), and this path has not run on a GPU so far."""

import asyncio
import itertools
import os
import queue
import tempfile
import threading
import time
import warnings
from concurrent.futures import Future

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from agent_loop import BadInput, render
from examples.calculator import build_model  # noqa: F401  (train.py calls it when no --model is given)
from examples.tiny_models import init_model

MAX_BATCH = 16  # conversations
GATHER_SECONDS = 0.005  # the first of a batch waits so long for others

THINGS = "a bicycle|a lost key|the first snow|a quiet library|an old map|bread|a night train|a lighthouse".split("|")
FORMS = "Write a line about {}.|Praise {} in one sentence.|Ask a polite question about {}.|Describe {} to a child."


def load(split: str) -> list[dict]:
    """Returns 24 prompts to train on, or 8 that are held out."""
    forms = FORMS.split("|")
    forms = forms[:3] if split == "train" else forms[3:]
    texts = [form.format(thing) for form, thing in itertools.product(forms, THINGS)]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


class Scorer:
    """A reward model, its tokenizer, and the one thread that runs it."""

    def __init__(self, model, tokenizer, device: str = "cpu"):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = device
        model.config.use_cache = False
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        last_token = self.encode(chat)[-1]
        if model.config.pad_token_id is None:
            # The model reads the score at the last token that is not padding, so no conversation
            # may end with the padding's id.
            candidates = (tokenizer.pad_token_id, 0, 1)
            usable = [token for token in candidates if token not in (None, last_token)]
            model.config.pad_token_id = usable[0]
        self.pad_token_id = model.config.pad_token_id
        self.inbox: queue.SimpleQueue[tuple[list[int], Future]] = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True, name="reward model").start()

    def encode(self, messages: list[dict]) -> list[int]:
        """Returns the token ids of a conversation.

        Of one that is longer than the model's window, it returns the end, which is to be scored."""
        # Special tokens come from the template alone: what is to be scored can spell none.
        ids = render(self.tokenizer, messages, trusted=(), add_generation_prompt=False)
        window = getattr(self.model.config, "max_position_embeddings", None) or len(ids)
        return ids[-min(window, self.tokenizer.model_max_length) :]

    async def score(self, messages: list[dict]) -> float:
        """Returns the model's logit for a conversation."""
        future: Future = Future()
        # It is encoded here and not in the thread, so that a bad conversation fails alone.
        self.inbox.put((self.encode(messages), future))
        return await asyncio.wrap_future(future)

    def gather(self) -> list[tuple[list[int], Future]]:
        """Waits for a conversation, and shortly for others; returns those that are not cancelled."""
        batch = [self.inbox.get()]
        end = time.monotonic() + GATHER_SECONDS
        while len(batch) < MAX_BATCH:
            try:
                batch.append(self.inbox.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                break
        return [(ids, future) for ids, future in batch if future.set_running_or_notify_cancel()]

    def work(self) -> None:
        """Scores batches for ever. If one fails, its trajectories are dropped and counted."""
        while True:
            batch = self.gather()
            try:
                scores = self.score_batch([ids for ids, _ in batch])
                for (_, future), score in zip(batch, scores, strict=True):
                    future.set_result(score)
            except Exception as error:  # out of memory, for example
                for _, future in batch:
                    future.set_exception(error)

    @torch.no_grad()
    def score_batch(self, conversations: list[list[int]]) -> list[float]:
        """Returns the logits of conversations, each a list of token ids."""
        if not conversations:  # all were cancelled
            return []
        rows = [torch.tensor(ids) for ids in conversations]
        # They are padded on the right, where positions stay as they are alone. (B, T)
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)
        ones = [torch.ones_like(row) for row in rows]
        attention_mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
        if self.device == "cpu":
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits  # (B, 1)
            return logits[:, 0].float().tolist()
        # A new thread's own default is GPU 0, not the rank's.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            try:
                self.model.to(device)
                inputs = {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}
                logits = self.model(**inputs).logits
                return logits[:, 0].float().tolist()
            finally:
                self.model.to("cpu")
                torch.cuda.empty_cache()  # blocks cached for this stream are of no use to any other


def tiny_reward_model() -> tuple:
    """Returns a random model and its tokenizer, of the built-in model's sizes.

    The run's own random numbers stay as they are."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        disable_progress_bar()  # of saving, as in train.py
        model, tokenizer = init_model(folder)
        model.config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(model.config), tokenizer


def load_reward_model(name: str) -> tuple:
    """Returns (model, tokenizer). Raises BadInput if it can't be loaded or is no reward model."""
    try:
        labels = AutoConfig.from_pretrained(name).num_labels
        if labels != 1:
            raise BadInput(f"RM_MODEL={name} has {labels} labels; a reward model has one")
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, info = AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", output_loading_info=True)
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"RM_MODEL={name} can't be loaded: {str(error).splitlines()[0]}") from error
    if info["missing_keys"]:  # transformers would fill them with random numbers
        raise BadInput(f"RM_MODEL={name} is no reward model: it lacks {sorted(info['missing_keys'])[:3]}")
    return model, tokenizer


DEVICE = os.environ.get("RM_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda"):
    raise BadInput(f"RM_DEVICE={DEVICE}: choose cpu or cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    raise BadInput("RM_DEVICE=cuda, but torch finds no CUDA device")
# The model is loaded here, on the main thread before anything runs, because loading changes
# torch's default dtype for the whole process.
NAME = os.environ.get("RM_MODEL")
if NAME:
    SCORER = Scorer(*load_reward_model(NAME), DEVICE)
else:
    warnings.warn("RM_MODEL is not set: a tiny RANDOM reward model only shows that the parts work", stacklevel=1)
    SCORER = Scorer(*tiny_reward_model(), DEVICE)


async def reward(output, row: dict) -> float:
    """Returns the reward model's logit for the whole conversation."""
    return await SCORER.score(output.messages)
