"""What fits a GPU? Counts the bytes of a policy and its engine, for the table of docs/scaling.md.

In bfloat16 on CUDA a policy is sharded, even on one GPU. tests/test_bench.py compares `states` and
`activations` with the tensors of a run on a CPU. `python results/pages.py tables` writes the table.
"""

from typing import NamedTuple

WINDOW = 2048  # the longest rollout, in tokens. An engine has a cache for 32 of them
LORA_RANK = 16
REST = 2e9  # bytes of CUDA and of a sleeping engine: 1.7 to 2.3 GB by results/gpu
ENGINE = 3e9  # what an engine needs beside weights and cache: a guess
USED = 0.95  # of a GPU's memory, at most


class Shape(NamedTuple):
    """A dense model of Qwen2's architecture, by the names of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def kv(self) -> int:
        """The elements of a token's keys in a layer, or of its values."""
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def layer(self) -> int:
        """The parameters of a decoder layer."""
        h = self.hidden_size
        attention = (h + 1) * (h + 2 * self.kv) + h * h
        return attention + 3 * h * self.intermediate_size + 2 * h

    @property
    def root(self) -> int:
        """The parameters outside the layers: embeddings, head and the last norm."""
        copies = 1 if self.tie_word_embeddings else 2
        return self.hidden_size * (self.vocab_size * copies + 1)

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer + self.root

    def adapters(self, rank: int) -> int:
        """The parameters of LoRA adapters of all linear layers but the head."""
        h = self.hidden_size
        attention = 4 * h + 2 * (h + self.kv)
        return self.num_hidden_layers * rank * (attention + 3 * (h + self.intermediate_size))


SHAPES = {  # those of Qwen2.5, and a tiny one
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
    "tiny": Shape(128, 256, 2, 4, 2, 320, True),
}


def states(shape: Shape, n_gpus: int = 1, rank: int = 0) -> dict[str, float]:
    """Returns the bytes on one GPU, all weights being trained, or LoRA adapters of this rank.

    What is trained is float32, frozen weights are bfloat16."""
    trained = shape.adapters(rank) if rank else shape.parameters
    frozen = shape.parameters if rank else 0
    return {
        "weights": (4 * trained + 2 * frozen) / n_gpus,
        "gradients": 4 * trained / n_gpus,
        "adam": 8 * trained / n_gpus,
    }


def activations(shape: Shape, n_tokens: int, recompute: bool = False) -> int:
    """Returns the bytes that the layers keep for a backward pass in bfloat16.

    Norms take 16 h, attention 4 h + 4 kv, the MLP 8 i. With recompute (--gradient_checkpointing)
    a layer keeps its input, 2 h, and one layer at a time has the whole."""
    h = shape.hidden_size
    of_layer = 20 * h + 4 * shape.kv + 8 * shape.intermediate_size
    n_layers = shape.num_hidden_layers
    return n_tokens * (n_layers * 2 * h + of_layer if recompute else n_layers * of_layer)


def update(shape: Shape, n_gpus: int, rank: int, n_tokens: int, recompute: bool) -> float:
    """Returns the bytes of an update with micro-batches of n_tokens."""
    # Whole in bfloat16: the root, a layer and the next. If all is trained, so are the root's
    # gradient and a layer's, and the latter in float32. Then four blocks of logits.
    whole = 2 * shape.root + 4 * shape.layer
    gradients = 0 if rank else 2 * shape.root + 6 * shape.layer
    logits = 4 * 4 * 4096 * n_tokens
    kept = sum(states(shape, n_gpus, rank).values())
    return kept + whole + gradients + logits + activations(shape, n_tokens, recompute) + REST


def tokens_of_a_pass(shape: Shape, rank: int) -> float:
    """Returns how many tokens keep a GPU busy: with fewer, a run recomputes activations."""
    return max(WINDOW, 1e14 / ((4 if rank else 6) * shape.parameters))  # devices.FLOPS_OF_A_PASS


def flags(shape: Shape, memory: float, n_gpus: int, rank: int) -> str:
    """Returns the table's words for the flags with which a model fits GPUs of so many bytes."""
    of_gpu = states(shape, n_gpus, rank)
    most = USED - (of_gpu["weights"] + of_gpu["adam"] + REST) / memory  # for the engine
    cache = 32 * WINDOW * 4 * shape.kv * shape.num_hidden_layers
    for tp in (1, 2, 4, 8)[: n_gpus.bit_length()]:
        least = ((2 * shape.parameters + cache) / tp + ENGINE) / memory
        shares = [i / 100 for i in range(100) if least <= i / 100 <= most]
        if shares:
            break
    recomputes = update(shape, n_gpus, rank, tokens_of_a_pass(shape, rank), False) > USED * memory
    if not shares or update(shape, n_gpus, rank, WINDOW, True) > USED * memory:
        return "no"
    share = min(shares, key=lambda share: abs(share - 0.5))
    words = {"R": recomputes, f"u{share:g}": share != 0.5, f"tp{tp}": tp > 1}
    return " ".join(word for word, is_needed in words.items() if is_needed) or "fits"


def rows() -> list[list[str]]:
    """Returns what fits GPUs of 24, 40 and 80 GB, a row for each model, the header first."""
    places = [(gigabytes, n_gpus) for gigabytes in (24, 40, 80) for n_gpus in (1, 8)]
    found = [["", *(f"{n_gpus} x {gigabytes} GB" for gigabytes, n_gpus in places)]]
    for name in [*SHAPES][:-1]:
        for kind, rank in {"": 0, ", LoRA": LORA_RANK}.items():
            cells = [flags(SHAPES[name], gb * 2**30, n_gpus, rank) for gb, n_gpus in places]
            found.append([name + kind, *cells])
    return found
