"""Lion against its algorithm, written out element by element."""

from __future__ import annotations

import numpy as np
import torch

from shardyard.optim.lion import Lion


def test_it_is_the_published_algorithm():
    rng = np.random.default_rng(0)
    weights, grads = rng.standard_normal((3, 4)), rng.standard_normal((6, 3, 4))
    parameter = torch.nn.Parameter(torch.tensor(weights))
    lion = Lion([{"params": [parameter], "lr": 0.01, "weight_decay": 0.3}], (0.9, 0.99))
    momentum = np.zeros_like(weights)
    for grad in grads:
        parameter.grad = torch.tensor(grad)
        lion.step()
        update = np.sign(0.9 * momentum + 0.1 * grad)
        weights = weights - 0.01 * (update + 0.3 * weights)
        momentum = 0.99 * momentum + 0.01 * grad
    assert np.allclose(parameter.detach().numpy(), weights, rtol=0, atol=1e-14)
    assert np.allclose(lion.state[parameter]["exp_avg"].numpy(), momentum, rtol=0, atol=1e-15)


def test_elements_without_a_gradient_only_decay():
    parameter = torch.nn.Parameter(torch.full((2,), 2.0))
    lion = Lion([{"params": [parameter], "lr": 0.1, "weight_decay": 0.5}])
    parameter.grad = torch.tensor([0.0, 1e-30])
    lion.step()
    assert parameter.tolist() == [np.float32(1.9), np.float32(1.8)]
