"""The serving loop in `Engine.step`: schedule, copy pages, compute.

Scheduling is plain Python over integers. Only three jitted programs access arrays (`store`, `load`,
`next_tokens`); their shapes are static, so nothing is compiled while serving.

A run with a host pool is bitwise identical to a run with all pages in HBM: scheduling depends on
numbers of tokens and on `Limits`, not on time or the location of pages, so both runs compute the
same tokens in the same batches; the number of pages only affects gathers and scatters, which move
bytes; and page copies are exact. A run that recomputes evicted pages has different batches and
agrees up to rounding; with float32 products, the error is far below the margin between the two best
tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv.metadata import BatchMetadata

from .block_manager import BlockManager, Placement, page_names
from .model import Batch, Config, Params, next_tokens
from .tokenizer import Tokenizer

# Donated, so that they write in place.
store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
load = jax.jit(jaxkv.load_pages, donate_argnames="cache")


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler, which also determine the static shapes."""

    page_size: int  # tokens per page
    batch: int  # maximum number of running turns
    chunk: int  # prompt tokens per step (chunked prefill)
    pages_per_turn: int  # pages of the longest sequence
    pages_in_use: int  # of all running turns, shared pages counted once for each turn


@dataclass(eq=False)
class Turn:
    """One turn of a conversation: prompt, progress and answer."""

    conversation: str
    index: int
    prompt: list[int]  # the conversation up to the new question
    max_new_tokens: int
    known: int = 0  # prompt tokens computed in earlier turns
    answer: list[int] = field(default_factory=list)
    computed: int = 0  # tokens with keys and values in HBM
    placement: Placement = field(default_factory=Placement)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.prompt) + len(self.answer) - self.computed

    def num_pages(self, page_size: int) -> int:
        """Maximum number of pages of the turn."""
        return -(-(len(self.prompt) + self.max_new_tokens) // page_size)


class Engine:
    """Continuous batching over a DeviceCache and, unless `num_host_pages` is 0, a HostPool."""

    def __init__(
        self,
        config: Config,
        params: Params,
        limits: Limits,
        num_hbm_pages: int,
        num_host_pages: int = 0,
        layout: Any = "page_first_direct",
        stop: int | None = None,
    ):
        if not limits.pages_per_turn <= limits.pages_in_use <= num_hbm_pages:
            raise ValueError(
                "pages_per_turn <= pages_in_use <= num_hbm_pages must hold, got "
                f"{limits.pages_per_turn}, {limits.pages_in_use} and {num_hbm_pages}"
            )
        self.config, self.params, self.limits, self.stop = config, params, limits, stop
        self.spec = jaxkv.KVCacheSpec(
            num_layers=config.num_hidden_layers,
            page_size=limits.page_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=params["norm"].dtype,
        )
        self.cache = jaxkv.DeviceCache.create(self.spec, num_pages=num_hbm_pages)
        self.pool: jaxkv.HostPool | None = None
        if num_host_pages:
            self.pool = jaxkv.HostPool.create(self.spec, num_pages=num_host_pages, layout=layout)
        self.blocks = BlockManager(num_hbm_pages, num_host_pages)
        self.waiting: deque[Turn] = deque()
        self.running: list[Turn] = []

    def submit(self, turn: Turn) -> None:
        pages, limit = turn.num_pages(self.limits.page_size), self.limits.pages_per_turn
        if pages > limit:
            raise ValueError(
                f"turn {turn.index} of {turn.conversation}: {pages} pages exceed "
                f"pages_per_turn={limit}"
            )
        self.waiting.append(turn)

    def step(self) -> None:
        """Admits a turn, then computes a chunk of one prompt and the next token of every answer.

        The only host sync is the read of the tokens; any other would be an error.
        """
        with jaxkv.forbid_host_sync():
            self._admit()
            if prompts := [turn for turn in self.running if turn.missing > 1]:
                self._compute(prompts[:1], max_turns=1, max_tokens=self.limits.chunk)
            if answers := [turn for turn in self.running if turn.missing == 1]:
                self._compute(answers, max_turns=self.limits.batch, max_tokens=self.limits.batch)

    def _admit(self) -> None:
        """Starts the first queued turn if all its pages fit in addition to those in use."""
        if not self.waiting or len(self.running) == self.limits.batch:
            return
        page_size, turn = self.limits.page_size, self.waiting[0]
        pages = sum(turn.num_pages(page_size) for turn in (*self.running, turn))
        if pages > self.limits.pages_in_use:
            return
        self.running.append(self.waiting.popleft())
        turn.admitted_at = time.perf_counter()
        # Without the last prompt token, which is always computed to obtain the next logits.
        names = page_names(turn.prompt[:-1], page_size)
        turn.placement = self.blocks.place(names, turn.num_pages(page_size))
        found = turn.placement.found_in_hbm + len(turn.placement.loads)
        turn.computed = found * page_size
        self._move(turn.placement)

    def _move(self, placement: Placement) -> None:
        """Issues the copies of one turn: at most one store, then at most one load.

        The store must read an evicted page before the load or a prefill writes it. JAX guarantees
        the order: the writers get the cache by donation, and a donated buffer is not written before
        the programs that read it are complete. The load takes the pool returned by the store.
        """
        if placement.stores:
            self.pool = store(self.pool, self.cache, *self._ids(placement.stores))
        if placement.loads:
            self.cache = load(self.pool, self.cache, *self._ids(placement.loads))

    def _ids(self, copies: Sequence[tuple[int, int]]) -> np.ndarray:
        """Host and device pages, int32[2, pages_per_turn], padded with -1."""
        ids = np.full((2, self.limits.pages_per_turn), -1, np.int32)
        ids[:, : len(copies)] = np.reshape(copies, (-1, 2)).T
        return ids

    def _compute(self, turns: Sequence[Turn], max_turns: int, max_tokens: int) -> None:
        """Computes the missing tokens of each turn, in a batch of static shape."""
        each = max_tokens // max_turns
        new = [turn.tokens[turn.computed :][:each] for turn in turns]
        tokens = np.zeros(max_tokens, np.int32)
        tokens[: sum(map(len, new))] = [token for part in new for token in part]
        rows = BatchMetadata.from_host(
            query_lens=[len(part) for part in new],
            seq_lens=[turn.computed + len(part) for turn, part in zip(turns, new, strict=True)],
            block_table=[turn.placement.pages for turn in turns],
            max_num_reqs=max_turns,
            max_num_tokens=max_tokens,
            max_blocks=self.limits.pages_per_turn,
            block_size=self.limits.page_size,
        )
        batch = Batch(tokens, rows)
        chosen, self.cache = next_tokens(self.config, self.params, self.cache, batch)
        for turn, part in zip(turns, new, strict=True):
            count = len(part)
            turn.computed += count
            if turn.computed % self.limits.page_size < count:  # a page is now full
                names = page_names(turn.tokens[: turn.computed], self.limits.page_size)
                self.blocks.publish(turn.placement.pages, names)
        if any(turn.missing == 0 for turn in turns):
            with jaxkv.allow_host_sync("sampled tokens name pages and stop answers"):
                tokens = np.asarray(chosen)
            for turn, token in zip(turns, tokens.tolist(), strict=False):
                if turn.missing == 0:
                    self._append(turn, token)

    def _append(self, turn: Turn, token: int) -> None:
        turn.answer.append(token)
        turn.finished_at = time.perf_counter()
        turn.first_token_at = turn.first_token_at or turn.finished_at
        if len(turn.answer) == turn.max_new_tokens or token == self.stop:
            self.running.remove(turn)
            self.blocks.release(turn.placement.pages)

    def warm_up(self) -> None:
        """Compiles all programs by running them on padding; call it before the first turn."""
        self._compute([], max_turns=1, max_tokens=self.limits.chunk)
        self._compute([], max_turns=self.limits.batch, max_tokens=self.limits.batch)
        if self.pool is not None:
            self.pool = store(self.pool, self.cache, *self._ids([]))
            self.cache = load(self.pool, self.cache, *self._ids([]))
        jax.block_until_ready(self.cache)


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    conversations: Mapping[str, Sequence[str]],
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Turn]:
    """Serves all first turns, then all second ones, and so on; reports progress after each step.

    By the next turn of a conversation, its pages have been evicted from HBM by the others.
    """
    served: list[Turn] = []
    latest: dict[str, Turn] = {}
    for index in range(max(map(len, conversations.values()))):
        for name, turns in conversations.items():
            if index < len(turns):
                before = latest.get(name)
                history = before.tokens if before else []
                prompt = history + tokenizer.prompt(turns[index], history)
                known = before.computed if before else 0
                latest[name] = Turn(name, index, prompt, max_new_tokens, known)
                engine.submit(latest[name])
                served.append(latest[name])
        while engine.waiting or engine.running:
            engine.step()
            left = len(engine.waiting) + len(engine.running)
            progress(f"turn {index + 1}, {left} conversations left")
        jaxkv.check_errors(engine.cache, engine.pool)
    return served
