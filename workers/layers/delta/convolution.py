"""The short causal convolution before the gated delta rule, over rows that go on from a state."""

import torch
from torch.nn import functional


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's last inputs, weighed, then silu.

    x: (rows, length, channels). weight: (channels, taps), the last tap is the token's own. before:
    (rows, channels, taps - 1), the inputs before x, None for zeros. Returns what is made of x, as
    x, and the inputs that come before the next token, as before.
    """
    taps = weight.shape[1]
    given = x.transpose(1, 2)
    if before is None:
        before = given.new_zeros((*given.shape[:2], taps - 1))
    window = torch.cat((before, given), dim=-1)
    made = functional.conv1d(window, weight.unsqueeze(1), groups=weight.shape[0])
    # A copy: a view would keep all of the window while it waits to be committed.
    return functional.silu(made).transpose(1, 2), window[..., window.shape[-1] - taps + 1 :].clone()
