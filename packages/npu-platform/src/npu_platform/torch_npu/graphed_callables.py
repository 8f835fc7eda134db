"""Owns ``make_graphed_callables``: functions and modules whose forward and backward are replays of graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .graphs import NPUGraph, PoolHandle, graph, graph_pool_handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    callables: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolHandle | None = None,
) -> Any:
    """Return functions or modules that replay graphs of ``callables``, forward and, where inputs need it, backward.

    Inputs are copied into the sample's tensors; outputs are those of the last replay. A module comes back as itself,
    with a graphed ``forward`` for the mode (training or not) that it was captured in.

    Args:
        callables: one or several, in the order in which they will run.
        sample_args: tensors for the one callable, or a tuple of tensors for each; ``requires_grad`` as it will be.
        num_warmup_iters: eager runs before the capture.
        allow_unused_input: whether inputs may have no gradient.
        pool: memory of ``graph_pool_handle()`` to capture into.

    Raises:
        RuntimeError: autocast caches its casts, which a replay could not renew.
        ValueError: a sample is not a tensor, or a module has hooks or buffers that require grad.
    """
    if torch.is_autocast_enabled("npu") and torch.is_autocast_cache_enabled():
        msg = "make_graphed_callables cannot replay cached casts: use torch.autocast(..., cache_enabled=False)"
        raise RuntimeError(msg)
    one = not isinstance(callables, tuple)
    functions: tuple[Any, ...] = (callables,) if one else callables  # type: ignore[assignment]
    samples: tuple[Any, ...] = (sample_args,) if one else sample_args
    sections = [_Section.check(function, args) for function, args in zip(functions, samples, strict=True)]
    for section in sections:
        section.warm_up(num_warmup_iters, allow_unused_input)
    handle = graph_pool_handle() if pool is None else pool
    # In the order in which they will run, so that the sections' memory lives as long as it is needed.
    for section in sections:
        section.capture_forward(handle)
    for section in reversed(sections):
        section.capture_backward(handle, allow_unused_input)
    graphed = tuple(section.graphed() for section in sections)
    return graphed[0] if one else graphed


@dataclass
class _Section:
    """One callable and its graphs: ``inputs`` are what the caller passes and, for a module, its parameters."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    passed: int  # how many of the inputs the caller passes

    @classmethod
    def check(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> _Section:
        passed = tuple(pytree.arg_tree_leaves(*args))
        if not all(isinstance(arg, torch.Tensor) for arg in passed):
            msg = "make_graphed_callables takes samples that hold tensors only"
            raise ValueError(msg)
        parameters: tuple[Tensor, ...] = ()
        if isinstance(function, torch.nn.Module):
            _check_module(function)
            parameters = tuple(function.parameters())
        return cls(function, args, passed + parameters, len(passed))

    def warm_up(self, iterations: int, allow_unused: bool) -> None:
        for _ in range(iterations):
            outputs = tuple(out for out in pytree.tree_leaves(self.function(*self.args)) if out.requires_grad)
            if outputs:
                self._gradients(outputs, tuple(torch.empty_like(out) for out in outputs), allow_unused)

    def capture_forward(self, pool: PoolHandle) -> None:
        self.forward = NPUGraph()
        with graph(self.forward, pool=pool):
            outputs = self.function(*self.args)
        leaves, self.structure = pytree.tree_flatten(outputs)
        self.outputs = tuple(leaves)

    def capture_backward(self, pool: PoolHandle, allow_unused: bool) -> None:
        self.backward = NPUGraph()
        self.grad_outputs = tuple(torch.empty_like(out) if out.requires_grad else None for out in self.outputs)
        self.grad_inputs: tuple[Tensor | None, ...] = (None,) * len(self.inputs)
        differentiable = tuple(out for out in self.outputs if out.requires_grad)
        if not differentiable:
            return
        with graph(self.backward, pool=pool):
            given = tuple(grad for grad in self.grad_outputs if grad is not None)
            gradients = iter(self._gradients(differentiable, given, allow_unused))
        self.grad_inputs = tuple(next(gradients) if tensor.requires_grad else None for tensor in self.inputs)

    def graphed(self) -> Callable[..., Any]:
        function = _function_of(self)

        def replay(*args: Any) -> Any:
            outputs = function.apply(*pytree.arg_tree_leaves(*args), *self.inputs[self.passed :])
            return pytree.tree_unflatten(outputs, self.structure)

        module = self.function
        if not isinstance(module, torch.nn.Module):
            return replay
        eager, training = module.forward, module.training
        # As torch.cuda does: the user's module keeps its identity, its parameters and its name in other modules.
        module.forward = lambda *args: replay(*args) if module.training == training else eager(*args)
        return module

    def _gradients(self, outputs: tuple[Tensor, ...], given: tuple[Tensor, ...], allow_unused: bool) -> tuple[Any, ...]:
        inputs = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
        return torch.autograd.grad(outputs, inputs, given, allow_unused=allow_unused)


def _check_module(module: torch.nn.Module) -> None:
    if module._backward_hooks or module._forward_hooks or module._forward_pre_hooks:
        msg = "make_graphed_callables takes modules without hooks: register them afterwards"
        raise ValueError(msg)
    if any(buffer.requires_grad for buffer in module.buffers()):
        msg = "make_graphed_callables takes modules whose buffers do not require grad"
        raise ValueError(msg)


def _function_of(section: _Section) -> type[torch.autograd.Function]:
    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            del ctx
            for target, source in zip(section.inputs[: section.passed], inputs, strict=False):
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
            section.forward.replay()
            return tuple(out.detach() for out in section.outputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            del ctx
            for target, source in zip(section.grad_outputs, grads, strict=True):
                if target is not None and target.data_ptr() != source.data_ptr():
                    target.copy_(source)
            section.backward.replay()
            return tuple(None if grad is None else grad.detach() for grad in section.grad_inputs)

    return Graphed
