"""Linear layers with weights in the blocked layout that oneDNN computes on.

From plain row-major weights, the BLAS of torch's CPU build copies them into such blocks anew in each call: nothing
beside a long prompt, but nearly half of the time at a batch of 8. Blocked once, each weight is read once a step,
which then costs about the same at batch 8 as at 1.
<https://uxlfoundation.github.io/oneDNN/dev_guide_inner_product.html>
"""

import torch

_TYPICAL_ROWS = 8
"""The batch that the layout is chosen for; oneDNN's choice hardly depends on it."""


class PackedLinear(torch.nn.Module):
    """As `torch.nn.Linear` in inference, float32 on a CPU."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # No buffer: an opaque tensor can be neither moved, cast nor saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[…][in features]` → `[…][out features]`."""
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return packed


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and has_onednn


@torch.inference_mode()
def pack_linears(model: torch.nn.Module) -> None:
    """Replace every plain linear layer by a packed one. The row-major weights are freed, unless the embedding is tied
    to them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, PackedLinear(child))
