"""Handles of in-flight copies: pytrees that own the arrays of the copy.

The waits of a subclass return these arrays. A copy consists of segments, which complete in order:
layers of a page copy, arrays of a swap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import jax

from jaxkv._src.runtime.sharding import check_arguments_unsharded
from jaxkv._src.transfer.async_calls import _wait
from jaxkv._src.transfer.in_flight import Completion, check_same_trace, donation_error, keep_alive
from jaxkv._src.transfer.transformations import reject_transformations

Leaves: TypeAlias = tuple[Any, ...]  # arrays, or placeholders of a JAX transformation


class CopyHandle:
    """An in-flight copy: a pytree that owns the arrays of the copy."""

    def __init__(self, ticket: jax.Array | None = None, plan: jax.Array | None = None) -> None:
        # The ticket, int32[n], identifies the copy; None if there is nothing to wait for. The plan
        # has the validated pairs; None for the copy engine.
        self._ticket, self._plan = ticket, plan
        self._segments: tuple[int, ...] = ()  # layers or arrays, in the order of the copy
        self._waited: frozenset[int] = frozenset()  # of the segments
        self._timeout_s = 0.0
        self._completion = Completion()

    def done(self) -> bool:
        """Whether the entire copy is complete; the host does not block.

            if storing.done():                                # in any thread
                admit(host_pages)

        Outside jit only. It requires no wait and replaces none: JAX knows that the arrays are
        complete only after `wait`. It may become True late: it also covers all copies that this
        process had started, on any device, by the first call of `done` after the start has run.

        Raises:
          RuntimeError: the handle is traced, its arrays were donated, closed or deleted, or they
            are not JAX arrays.
        """
        return self._completion.is_complete(self._ticket, jax.tree.leaves(self._leaves()))

    def _wait_call(
        self,
        arrays: list[jax.Array],
        retained: list[jax.Array],
        after: Sequence[Any],
        **options: Any,
    ) -> list[jax.Array]:
        """Waits; returns the next ticket, if any, and the arrays."""
        assert self._ticket is not None
        retained = retained if self._plan is None else [self._plan, *retained]
        operands = (self._ticket, *retained, *after)
        operands, arrays, options = reject_transformations("wait", (operands, arrays, options))
        if not options.get("boundary"):  # `sharded_arguments` rejects those that are not redundant
            own = 1 + len(retained)
            check_arguments_unsharded(
                "wait", {"the handle": (operands[:own], arrays), "after": operands[own:]}
            )
        run = _wait
        if not any(isinstance(operand, jax.core.Tracer) for operand in (*operands, *arrays)):
            _check_donation(self._ticket)
            _check_not_deleted([self._ticket, *retained, *arrays])
            run = _wait_donated if options["places"] else _wait_undonated
        last = len(self._segments) - 1
        keywords = {
            "timeout_s": self._timeout_s,
            "retained": len(retained),
            "last": last,
            **options,
        }
        # Outside jit a wait is jitted, also under `disable_jit`: XLA copies the operands of an
        # operation executed eagerly.
        with contextlib.nullcontext() if run is _wait else jax.disable_jit(False):
            waited = run(arrays, operands, **keywords)
        check_same_trace(self._ticket, waited[0])
        return waited

    def _leaves(self) -> Leaves:
        raise NotImplementedError

    def _leaves_past_boundary(self) -> Leaves:
        """The leaves after a wait that is removed if the program waits for them later."""
        raise NotImplementedError

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        raise NotImplementedError

    def _static(self) -> tuple[Any, ...]:
        """The static part of the pytree."""
        return self._segments, self._waited, self._timeout_s

    def _with_static(self, static: tuple[Any, ...]) -> Self:
        self._segments, self._waited, self._timeout_s = static
        return self

    def tree_flatten(self) -> tuple[Leaves, tuple[Any, ...]]:
        traced = isinstance(self._ticket, jax.core.Tracer)
        _check_donation(self._ticket)
        leaves = self._leaves_past_boundary() if traced else self._leaves()
        return leaves, self._static()

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Leaves) -> Self:
        started = cls._of_leaves(*leaves)._with_static(static)
        keep_alive(leaves)
        _check_donation(started._ticket)
        return started


_STATIC = ("timeout_s", "segment", "places", "retained", "last", "boundary")
_wait_undonated = jax.jit(_wait, static_argnames=_STATIC)
_wait_donated = jax.jit(_wait, static_argnames=_STATIC, donate_argnums=0)


def undeleted(arrays: Sequence[Any]) -> list[Any]:
    """The arrays that a wait may have as operands: not closed, deleted or donated."""
    return [array for array in arrays if not _is_deleted(array)]


def _is_deleted(array: Any) -> bool:
    traced = isinstance(array, jax.core.Tracer)
    return not traced and hasattr(array, "is_deleted") and array.is_deleted()


def _check_donation(ticket: Any) -> None:
    """Raises a RuntimeError if JAX would copy the arrays of a handle that leaves its program."""
    between_programs = isinstance(ticket, jax.Array) and not isinstance(ticket, jax.core.Tracer)
    if between_programs and jax.config.jax_debug_nans:  # type: ignore[attr-defined]
        raise donation_error()


def _check_not_deleted(arrays: Sequence[Any]) -> None:
    if any(map(_is_deleted, arrays)):
        raise RuntimeError(
            "wait: an array of the handle was deleted or donated: if the handle was passed to a "
            "program as a donated argument, use the arrays or the handle that the program returned"
        )


def leaves_to_compute(after: Any) -> list[Any]:
    """The arrays of the argument `after` of a wait; they get no gradient from it."""
    return [
        jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
        for leaf in jax.tree.leaves(after)
    ]
