"""Attention in float64 by loops over tokens, heads and keys; shares no code with kvblocks.

Works on logical sequences (k [num_keys, num_kv_heads, head_dim]), so it knows nothing of blocks or layouts.
"""

import math

import numpy as np


def attend_query(q, k, v, num_keys, *, scale=None, window=None, soft_cap=None, sinks=None, alibi_slopes=None):
    """One query q [num_q_heads, head_dim] that is the last of the first num_keys tokens.

    Returns (out [num_q_heads, head_dim_v], lse [num_q_heads]).
    """
    num_q_heads, head_dim = q.shape
    num_kv_heads, head_dim_v = v.shape[1:]
    out = np.zeros((num_q_heads, head_dim_v))
    lse = np.full(num_q_heads, -math.inf)
    if num_keys == 0:
        return out, lse
    if scale is None:
        scale = head_dim**-0.5
    oldest = 0 if window is None else max(0, num_keys - window)
    for head in range(num_q_heads):
        kv_head = head * num_kv_heads // num_q_heads
        logits = []
        for key in range(oldest, num_keys):
            logit = scale * float(np.dot(q[head], k[key, kv_head]))
            if soft_cap is not None:
                logit = soft_cap * math.tanh(logit / soft_cap)
            if alibi_slopes is not None:
                logit -= float(alibi_slopes[head]) * (num_keys - 1 - key)
            logits.append(logit)
        terms = logits if sinks is None else [*logits, float(sinks[head])]
        top = max(terms)
        total = math.fsum(math.exp(term - top) for term in terms)
        for key, logit in zip(range(oldest, num_keys), logits, strict=True):
            out[head] += math.exp(logit - top) / total * v[key, kv_head]
        lse[head] = top + math.log(total)
    return out, lse


def attend(queries, sequences, **options):
    """Causal attention of a batch: queries [row][query, num_q_heads, head_dim], sequences [row] = (k, v).

    The queries of a row are the last positions of its sequence. Returns (out, lse) of all queries.
    """
    outs, lses = [], []
    for row_queries, (k, v) in zip(queries, sequences, strict=True):
        for index, query in enumerate(row_queries):
            num_keys = max(0, len(k) - len(row_queries) + index + 1) if len(k) else 0
            out, lse = attend_query(query, k, v, num_keys, **options)
            outs.append(out)
            lses.append(lse)
    return np.array(outs), np.array(lses)
