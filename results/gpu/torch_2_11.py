"""Gives torch 2.11 the two things that flatrl takes from torch 2.13. It edits the installed files.

    python results/gpu/torch_2_11.py

The records of this folder come from a host with torch 2.11. varlen_attn has no enable_gqa there,
although its kernel groups queries; and FSDPModule has no reset_iter_state."""

import importlib.util
from pathlib import Path

TORCH = Path(importlib.util.find_spec("torch").origin).parent
RESET = '''    def reset_iter_state(self) -> None:
        from ._fsdp_common import TrainingState

        torch.cuda.synchronize()
        root = self._get_fsdp_state()
        root._comm_ctx.all_gather_state = None
        root._comm_ctx.reduce_scatter_state = None
        root._comm_ctx.post_forward_order.clear()
        for state in root._state_ctx.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            group = state._fsdp_param_group
            if group is None:
                continue
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
        root._state_ctx.iter_forward_root = None
        root._state_ctx.post_backward_final_callback_queued = False

'''


def insert(file: str, text: str, before: str) -> None:
    """Inserts text into a file of torch, in front of what it must contain once."""
    path = TORCH / file
    source = path.read_text()
    if text not in source:
        assert source.count(before) == 1, file
        path.write_text(source.replace(before, text + before))


insert(
    "nn/attention/varlen.py",
    "    enable_gqa: bool = False,\n",
    ") -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:",
)
insert(
    "distributed/fsdp/_fully_shard/_fully_shard.py",
    RESET,
    "    def set_is_last_backward(self",
)
