"""Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices; g: (n, rows, cols)."""
    wide = g.shape[1] > g.shape[2]
    x = g.transpose(1, 2) if wide else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: Tensor = x.transpose(1, 2) if wide else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised updates; matrices of one shape go through together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(state["momentum"], group["momentum"]))
                update = orthogonalise(torch.stack(updates))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, update, strict=True):
                    p.add_(u, alpha=-scale)


class Optimisers:
    """Both optimisers behind one `step`, their rates scaled together."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and "proj" in n]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0), adam_lr)
        ]
        if matrices and muon_lr > 0:
            self.parts.append((Muon(matrices, muon_lr), muon_lr))

    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the base rates and clear them."""
        for optimiser, lr in self.parts:
            optimiser.param_groups[0]["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
