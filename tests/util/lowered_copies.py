"""Random programs around started copies, and what the library decides about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

import jaxkv
from jaxkv._src.transfer import buffer_lifetime
from jaxkv._src.transfer.buffer_aliases import BufferAliases
from tests.util.lifetime_interpreter import WAIT, Interpreter
from tests.util.transfer_cases import Case, as_ids, distinct_ids


class Program:
    """A random program; `plain` if no transfer crosses a pytree boundary inside it.

    Attributes:
      complete: whether it waits for, or returns, everything that it starts.
      copied: whether a handle was duplicated, so that one of the two may end early.
    """

    def __init__(self, case: Case, named: str, seed: int) -> None:
        self.case, self.named = case, named
        self.random = random.Random(seed)
        self.plain = self.random.random() < 0.25
        self.complete, self.copied = True, False
        self.donate_pool = self.random.random() < 0.5
        self.seed = seed

    def lowered(self) -> Module:
        """The program with the starts of the copies."""
        _, ids = self.arguments()
        caches = self.case.cache(), self.case.cache()
        args = self.case.pool(), caches, jnp.float32(1), *ids
        donated = (0, 1) if self.donate_pool else (1,)
        return Module(jax.jit(self.step, donate_argnums=donated).lower(*args))

    def continued(self) -> Module:
        """A second program, which takes a handle of another program."""
        _, ids = self.arguments()
        begin = jax.jit(partial(self.start, direction=self.direction()))
        started = jax.eval_shape(begin, self.case.pool(), self.case.cache(), *ids)

        def step(started: Any, x: Any) -> Any:
            self.random.seed(self.seed)
            return self.use([started], x)

        return Module(jax.jit(step, donate_argnums=0).lower(started, jnp.float32(1)), started)

    def arguments(self) -> tuple[Any, list[Any]]:
        numpy_ids = distinct_ids(self.case, 4, 0)
        return numpy_ids, [as_ids(side, self.named) for side in numpy_ids]

    def direction(self) -> str:
        return self.random.choice(("load", "store"))

    def start(self, pool: Any, cache: Any, *ids: Any, direction: str) -> Any:
        options: dict[str, Any] = {"implementation": self.named}
        options["layers"] = self.random.choice([None, None, (2, 0), 1])
        if direction == "load":
            return jaxkv.start_load(pool, cache, *ids, **options)
        return jaxkv.start_store(pool, cache, *ids, **options)

    def step(self, pool: Any, caches: Any, x: Any, *ids: Any) -> Any:
        self.random.seed(self.seed)
        cache, other = caches
        started = [self.start(pool, cache, *ids, direction=self.direction())]
        if self.random.random() < 0.2:
            started.append(self.start(pool, other, *ids, direction="load"))
        return self.use(started, x)

    def use(self, started: list[Any], x: Any) -> Any:
        results: list[Any] = []
        for _ in range(self.random.randrange(6)):
            i = self.random.randrange(len(started))
            if self.plain or self.random.random() < 0.4:
                results.append(wait(self.random, started[i], x))
            else:
                crossing = self.random.choice(CROSSINGS)
                self.copied |= crossing in (_inner_drops, _cond_in_one_branch)
                started[i], x = crossing(self.random, started[i], x)
        for one in started:
            end = self.random.choice(("finish", "return", "drop", "drop"))
            if end == "finish":
                results.append((getattr(one, "pool", None), one.cache))
            elif end == "return":
                results.append(one)
            else:
                self.complete &= ended(one)
        return results, x, jnp.ones((9, 4, 2, 16), jnp.bfloat16)  # of a layer's shape


def ended(started: Any) -> bool:
    """Whether all layers of a transfer were waited for."""
    if isinstance(started, jaxkv.StoreHandle):
        return started._ticket is None
    return started._ticket is None or len(started._waited) == len(started._segments)


def wait(choices: random.Random, started: Any, x: Any) -> Any:
    # Rarely several layers, so that many programs drop one.
    layers = choices.sample(started._segments, min(2, len(started._segments)))
    after = x if choices.random() < 0.5 else None
    return started.wait(layers if choices.random() < 0.25 else layers[0], after=after)


def _inner_jit(choices: random.Random, started: Any, x: Any, *, inline: bool = False) -> Any:
    layer = choices.choice([None, *started._segments])

    def inner(started: Any, x: Any) -> Any:
        if layer is not None:
            x = x + started.wait(layer)[0].sum().astype(x.dtype)
        return started, x

    return jax.jit(inner, inline=inline)(started, x)


_SHARED = jax.jit(lambda started, x: (started, x + 1))


def _shared(choices: random.Random, started: Any, x: Any) -> Any:
    """One function of the module, called again and again: its argument has many origins."""
    for _ in range(choices.randrange(1, 4)):
        started, x = _SHARED(started, x)
    return started, x


def _nested(choices: random.Random, started: Any, x: Any) -> Any:
    return jax.jit(partial(_inner_jit, random.Random(choices.random())))(started, x)


def _inner_drops(choices: random.Random, started: Any, x: Any) -> Any:
    """The inner program waits for one layer of its duplicate of the handle, and returns none."""
    layer = choices.choice(started._segments)
    x = jax.jit(lambda one, x: x + one.wait(layer)[0].sum().astype(x.dtype))(started, x)
    return started, x


def _tree_map(choices: random.Random, started: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, started), x


def _barrier(choices: random.Random, started: Any, x: Any) -> Any:
    return jax.lax.optimization_barrier((started, x))


def _cond(choices: random.Random, started: Any, x: Any) -> Any:
    layer = choices.choice([None, *started._segments])

    def branch(started: Any, x: Any) -> Any:
        if layer is not None:
            x = x + started.wait(layer)[0].sum().astype(x.dtype)
        return started, x + 1

    other = branch if layer is not None else lambda started, x: (started, x)
    return jax.lax.cond(x > 0, branch, other, started, x)


def _cond_in_one_branch(choices: random.Random, started: Any, x: Any) -> Any:
    def branch(started: Any, x: Any) -> Any:
        return x + started.cache.layers[0][0].sum().astype(x.dtype)

    return started, jax.lax.cond(x > 0, branch, lambda started, x: x, started, x)


def _scan(choices: random.Random, started: Any, x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        started, x = carry
        return (started, x * 2), None

    return jax.lax.scan(body, (started, x), length=2)[0]


def _checkpoint(choices: random.Random, started: Any, x: Any) -> Any:
    layer = choices.choice(started._segments)

    def inner(started: Any, x: Any) -> Any:
        return started, x + started.wait(layer)[0].sum().astype(x.dtype)

    return jax.checkpoint(inner)(started, x)


CROSSINGS: tuple[Callable[..., Any], ...] = (
    _inner_jit,
    partial(_inner_jit, inline=True),
    _nested,
    _shared,
    _inner_drops,
    _tree_map,
    _barrier,
    _cond,
    _cond_in_one_branch,
    _scan,
    _checkpoint,
)


def always_beside(program: buffer_lifetime._Program) -> None:
    """No analysis: every start overlaps with its program, and no boundary waits."""
    for wait in program.waits.copy():
        if buffer_lifetime._is_removable(wait):
            program.remove(wait)
    for start in program.starts:
        buffer_lifetime.configure(start, joined=ir.BoolAttr.get(False))


class Module:
    """A lowered program.

    Args:
      lowered: of `jax.jit`.
      started: the transfer that is its first argument, if it starts none.
    """

    def __init__(self, lowered: jax.stages.Lowered, started: Any = None) -> None:
        self.module = lowered._lowering._hlo  # type: ignore[attr-defined]
        self.text = str(self.module)
        self.in_flight: list[tuple[int, int]] = []  # argument and segment
        self.ticket: int | None = None
        if started is not None:
            kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # type: ignore[attr-defined]
            segments = [segment_of_leaf(started, i) for i in range(len(jax.tree.leaves(started)))]
            arguments = [(i, segments[leaf]) for i, leaf in enumerate(kept) if leaf < len(segments)]
            self.ticket = kept.index(0) if 0 in kept else None
            self.in_flight = [(i, segment) for i, segment in arguments if segment is not None]

    @property
    def joined(self) -> list[bool]:
        """Whether each of its starts is joined."""
        lines = [line for line in self.text.splitlines() if "@jaxkv_start_copy" in line]
        return ["joined = true" in line for line in lines]

    @property
    def deferred(self) -> list[bool]:
        """Whether the waits enqueue a part of each of its copies."""
        lines = [line for line in self.text.splitlines() if "@jaxkv_start_copy" in line]
        return ["deferred = true" in line for line in lines]

    @property
    def returns_an_array_twice(self) -> bool:
        """XLA copies all but one of the results, so a copy in flight ends before."""
        with self.module.context:
            aliases = BufferAliases(self.module, buffer_lifetime._in_place_results)
            origins = [origin for v in aliases.returned() for origin in set(aliases.origins(v))]
            return len(set(origins)) < len(origins)

    @property
    def boundary_waits(self) -> int:
        """Number of waits at pytree boundaries."""
        lines = [line for line in self.text.splitlines() if f"@{WAIT}" in line]
        return sum("boundary = dense<>" not in line for line in lines)

    def violations(self, seed: int, runs: int = 4) -> list[str]:
        """Buffers that are freed too early in some runs, each with different branches."""
        choices = random.Random(seed)
        with self.module.context:
            return [
                line
                for _ in range(runs)
                for line in Interpreter(
                    self.module, self.in_flight, self.ticket, choices.randrange
                ).found()
            ]


def segment_of_leaf(started: Any, leaf: int) -> int | None:
    """Segment of the copy that uses a leaf of a transfer; None if unused."""
    last = len(started._segments) - 1
    kinds: list[int | None] = [None]  # the ticket
    kinds += [last] * (started._plan is not None)
    for layer, buffers in enumerate(started._cache.layers):
        used = layer in started._segments
        kinds += [started._segments.index(layer) if used else None] * len(buffers)
    return [*kinds, last][leaf]
