"""Routing replay (--router_replay; R3, arXiv 2510.11370): the engine returns the experts that it
chose for every token and layer, and the trainer weighs these by its own router.

Routes are integers (tokens, layers, k): the k experts of each token. A layer without experts has a
row, too, which is not read. -1 leaves the choice to the router."""

import base64
import functools
import io
import re

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatrl.bad_input import need


def join_routes(before: np.ndarray | None, routes: np.ndarray | None) -> np.ndarray | None:
    """Returns the routes of all tokens, if any: each keeps those with which it was first seen."""
    if before is None or routes is None:
        return before if routes is None else routes
    return np.concatenate([before, routes[len(before) :]])


def encode_routes(routes: np.ndarray | None) -> dict:
    """Returns the entry of an output's `extra`, a text in numpy's format; none without routes."""
    if routes is None:
        return {}
    file = io.BytesIO()
    np.save(file, routes)
    return {"routes": base64.b64encode(file.getvalue()).decode()}


def decode_routes(extra: dict) -> Tensor | None:
    """Returns the routes in an output's `extra`, None without."""
    if "routes" not in extra:
        return None
    file = io.BytesIO(base64.b64decode(extra["routes"]))
    return torch.from_numpy(np.load(file).astype(np.int16))


def pack_routes(batch: dict, micro, slots: Tensor) -> Tensor:
    """Returns the routes of the P tokens that go through the network, (P, layers, k).

    micro: a data.MicroBatch. slots: of its rows' tokens, (R, L), as in `data.pack_rows`. Raises
    BadInput if a token before a sampled one has no routes."""
    given = batch.get("routes") or [None] * len(batch["lengths"])
    known = [routes for routes in given if routes is not None]
    shape = known[0].shape[1:] if known else (1, 1)
    packed = torch.full((slots.max() + 1, *shape), -1, dtype=torch.int16)
    # A row's last token has no routes. The first row that has those of a token is written last.
    for row, length, row_slots in reversed([*zip(micro.rows, micro.lengths, slots)]):
        routes = packed[:0] if given[row] is None else given[row][:length]
        sampled = batch["response_mask"][row].nonzero()
        need(
            not len(sampled) or batch["prompt_lengths"][row] + sampled.max() <= len(routes),
            "--router_replay: an output has sampled tokens without routes: see TokenOutput.routes",
        )
        packed[row_slots[: len(routes)]] = routes.to(packed.dtype)
    return packed


class _GivenExperts(TorchFunctionMode):
    """In it a router's choice of k experts, which is torch.topk's, is the given one, (P, k)."""

    def __init__(self, given: Tensor, n_experts: int):
        super().__init__()
        self.given = given
        self.n_experts = n_experts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if result.indices.shape != self.given.shape or scores.shape[-1] != self.n_experts:
            return result  # such as a choice among groups of experts
        experts = torch.where(self.given < 0, result.indices, self.given.long())
        return torch.return_types.topk((scores.gather(-1, experts), experts))


class Routers:
    """A model's routers, which can be told what to choose. Raises BadInput unless they use topk."""

    def __init__(self, model: nn.Module, name: str):
        self.of_layer = []  # (number of the layer, router)
        for path, module in model.named_modules():
            if type(module).__name__.endswith("Router") and hasattr(module, "top_k"):
                number = re.search(r"\.(\d+)\.", path)
                self.of_layer.append((int(number[1]), module))
                module.forward = functools.partial(_replay, module, module.forward)
        need(
            self.of_layer and self._obeys(self.of_layer[0][1]),
            f"--router_replay: {name} has no routers, or none that can be told what to choose",
        )

    @torch.no_grad()
    def _obeys(self, router: nn.Module) -> bool:
        """Returns whether a router chooses the last experts if it is told to."""
        router.given = torch.arange(router.num_experts)[None, -router.top_k :]
        outputs = router(router.weight.new_zeros(1, router.weight.shape[1]))
        return any(torch.equal(output, router.given) for output in outputs)

    def choose(self, routes: Tensor):
        """Sets what the routers choose from now on, also when activations are recomputed."""
        for number, router in self.of_layer:
            # Without any routes, as of demonstrations, there is one layer of -1.
            router.given = routes[:, min(number, routes.shape[1] - 1)]


def _replay(router: nn.Module, forward, hidden_states: Tensor):
    """Calls the router's forward, whose choice is that in router.given."""
    with _GivenExperts(router.given, router.num_experts):
        return forward(hidden_states)
