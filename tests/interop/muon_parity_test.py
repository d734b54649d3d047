"""Compare the optimizer muon with torch.optim.Muon in `make parity`. The test is skipped without torch."""

import numpy as np
import pytest
from helpers.training_updates import updated

from difftx.training.optimizer import learning_rate

torch = pytest.importorskip("torch", reason="make parity installs torch and transformers")


@pytest.mark.parametrize("split", ["none", "groups"])
def test_twenty_updates_equal_those_of_torch(config, mesh_of, monkeypatch, split):
    # Torch's Newton-Schulz iterations cast by `x.to(torch.bfloat16)`, or by `x.bfloat16()` since torch 2.14.
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    c = config(
        optimizer__name="muon",
        optimizer__muon__split=split,
        optimizer__weight_decay=0.3,
        optimizer__clip_norm=None,
        train__steps=25,
    )
    first, found, grads = updated(c, mesh_of(), 20)

    def matrices(tree):
        """Yield the matrices [outputs, inputs] of each layer, as in torch. If groups are split, yield one per group."""
        for part in ("attention/query_DHGd", "attention/output_HED", "mlp/up_DF", "mlp/down_FD"):
            for layer in tree[f"blocks/{part}"]:
                columns = (
                    layer.shape[-1] if part in ("attention/output_HED", "mlp/down_FD") else np.prod(layer.shape[1:])
                )
                if split == "groups" and part == "attention/query_DHGd":
                    for group in np.moveaxis(layer, -2, 0):
                        yield group.reshape(len(group), -1).T.copy()
                else:
                    yield layer.reshape(-1, columns).T.copy()

    weights = [torch.tensor(m, requires_grad=True) for m in matrices(first)]
    optimizer = torch.optim.Muon(weights, momentum=0.95, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for n, grad in enumerate(grads):
        for weight, g in zip(weights, matrices(grad), strict=True):
            weight.grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = float(learning_rate(c)(n))
        optimizer.step()
    for weight, ours in zip(weights, matrices(found), strict=True):
        np.testing.assert_allclose(ours, weight.detach().numpy(), rtol=1e-5, atol=1e-6)
