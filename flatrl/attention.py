"""The attention "packed" of transformers: causal within each sequence that data.pack joined."""

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    *,
    scaling: float | None = None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cu_seqlens_k: Tensor | None = None,
    key_index: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes causal attention within each packed sequence, for transformers' "packed".

    query (1, H, P, D); key, value (1, H_kv, P, D), H a multiple of H_kv. cu_seqlens, max_seqlen,
    cu_seqlens_k and key_index: from `data.pack` or `data.pack_rows`. key_index (K,): sequences that
    share a prefix read its keys again. sliding_window: the tokens that a token sees, itself
    included. softcap: of the scores. s_aux (H,): attention sinks.

    Returns (1, P, H, D), and None for the weights."""
    query = query.to(value.dtype)  # under autocast RoPE leaves float32
    key = key.to(value.dtype)
    if key_index is None:
        cu_seqlens_k = cu_seqlens
    else:
        key = key.index_select(2, key_index)  # (1, H_kv, K, D)
        value = value.index_select(2, key_index)
    window = min(sliding_window or max_seqlen, max_seqlen)
    is_bfloat16 = value.dtype == torch.bfloat16
    if query.is_cuda and is_bfloat16 and softcap is None and s_aux is None:
        from torch.nn.attention.varlen import varlen_attn

        left = -1 if window == max_seqlen else window - 1  # -1 chooses the faster, causal kernel
        attended = varlen_attn(
            query[0].transpose(0, 1),  # (P, H, D)
            key[0].transpose(0, 1),  # (K, H_kv, D)
            value[0].transpose(0, 1),
            cu_seqlens,
            cu_seqlens_k,
            max_seqlen,
            max_seqlen,
            scale=scaling,
            window_size=(left, 0),  # aligned to the keys' end
            enable_gqa=True,
        )
        return attended[None], None
    # split, not slices: the backward of a slice fills a tensor of the whole length every time.
    queries = query.split(cu_seqlens.diff().tolist(), dim=2)
    n_keys = cu_seqlens_k.diff().tolist()
    keys = key.split(n_keys, dim=2)
    values = value.split(n_keys, dim=2)
    sequences = zip(queries, keys, values)
    attended = [_attend(*sequence, scaling, window, softcap, s_aux) for sequence in sequences]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def _attend(query, key, value, scaling, window, softcap, sinks):
    """Computes the causal attention of one sequence, (1, H, n, D)."""
    n = query.shape[2]  # (1, H, n, D): of its last n tokens
    m = key.shape[2]  # (1, H_kv, m, D): of all m
    group_size = query.shape[1] // key.shape[1]
    how = {"scale": scaling, "enable_gqa": group_size > 1}
    is_ordinary = softcap is None and sinks is None
    # Without a mask it is faster, even with a few queries too many.
    if is_ordinary and m <= min(window, 1.2 * n):
        query = F.pad(query, (0, 0, m - n, 0))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
        return attended[:, :, m - n :]
    mask = torch.ones(n, m, dtype=torch.bool, device=query.device)
    mask = mask.tril(m - n).triu(m - n - window + 1)  # (n, m): True where a token sees another
    if is_ordinary:
        return F.scaled_dot_product_attention(query, key, value, mask, **how)
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scaling  # (1, H, n, m)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # one more column, whose value is 0
        sinks = sinks.float().view(1, -1, 1, 1).expand(1, -1, n, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(-1)[..., :m].to(value.dtype) @ value


def register_packed_attention():
    """Makes attn_implementation="packed" known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)
