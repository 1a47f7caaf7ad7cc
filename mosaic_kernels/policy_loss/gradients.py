"""The autograd.Function of every compiled loss: its gradients are made with it, in one pass, and scaled afterwards."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor


def with_gradients(module: ModuleType, loss: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """`loss` (0-d), differentiable once in each x of `pairs` (x, dx): dx [T] float32 is d loss / dx, computed already.

    `module` is the backend, whose `backward(dx, dloss)` gives dx times the 0-d dloss.
    """
    if not pairs:
        return loss
    return _WithGradients.apply(module, loss, *(tensor for pair in pairs for tensor in pair))


class _WithGradients(torch.autograd.Function):
    # The kernel runs outside: torch.compile refuses a Function that is given one tensor twice, as an old_logprob that
    # is also the reference model's.
    @staticmethod
    def forward(ctx: Any, module: ModuleType, loss: Tensor, *pairs: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(*pairs)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # True for create_graph=True alone: only then can somebody differentiate again.
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        out: list[Tensor | None] = [None, None]
        for x, dx in zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2]):
            gradient = ctx.module.backward(dx, dloss).to(x.dtype)
            out += [_Once.apply(gradient, x) if again else gradient, None]
        return tuple(out)


class _Once(torch.autograd.Function):
    """The identity, which depends on x and cannot be differentiated: without it a second derivative would be 0."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> NoReturn:
        raise NotImplementedError("compiled losses differentiate once: use backend='reference' for second derivatives")
