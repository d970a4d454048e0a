"""Tiles in registers: of weights, out of two halves; of products, to memory. Knows no format."""

import triton
import triton.language as tl


def _run_joined(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """(rows, words) of both -> (rows, 2 * words), by turns: as tensor cores take pairs."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


joined = triton.jit(_run_joined)


def _run_store_parts(
    out: tl.tensor,
    total: tl.tensor,
    split: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
) -> None:
    """total (rows, tokens) into out (splits, num_tokens, out_features), as far as it goes."""
    target = out + (split * num_tokens + tokens[:, None]).to(tl.int64) * out_features
    is_real = (tokens[:, None] < num_tokens) & (rows[None, :] < out_features)
    tl.store(target + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


store_parts = triton.jit(_run_store_parts)
