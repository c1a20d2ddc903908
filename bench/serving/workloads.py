"""Workloads of the serving benchmarks: clients whose requests follow each other.

A client's request `i` has the tokens and answers of its earlier ones as a prefix. Requests of all
clients wait in one queue, of which `parallel` are in flight: a client's next request goes to its
end, so that the others' evict its pages.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.serving.systems import Measured, Steps
from examples.serving.request import Request

BLOCK = 512  # tokens of a block of Mooncake's traces
MAX_ANSWER = 32  # tokens, of the trace's answers; prompts are its subject


class Turn(NamedTuple):
    """A request: `new` tokens after the client's earlier ones, or a whole prompt."""

    new: list[int]
    answer: int
    whole: bool = False


class Served(NamedTuple):
    """Requests of a workload, or of a window of its time.

    Attributes:
      requests: those whose rates, times to first token, and hits are measured.
      running: those whose inter-token latencies are measured.
      steps: steps of the measured time.
      start: start of the measured time, which ends with the last token of `requests`.
      since: start of the inter-token latencies; tokens before it do not count.
    """

    requests: list[Request]
    running: list[Request]
    steps: Steps
    start: float
    since: float = 0.0

    @property
    def all(self) -> list[Request]:
        """All requests, each once."""
        both = {id(request): request for request in (*self.requests, *self.running)}
        return [*both.values()]


Flight = tuple[list[Turn], int, list[int]]  # turns, number of the next one, history


@dataclass
class Workload:
    """Clients, each a sequence of turns; of them `parallel` are served at once.

    Attributes:
      first: number of the first turn that is measured, and that waits for all earlier ones.
      window: number of measured requests, in the order in which they end, of a sample; None: all.
    """

    clients: list[list[Turn]]
    parallel: int
    first: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window and self.measured % self.window:
            raise ValueError(
                f"Workload: {self.measured} measured requests are no multiple of "
                f"window={self.window}"
            )

    @property
    def measured(self) -> int:
        """Number of measured requests."""
        return sum(max(0, len(turns) - self.first) for turns in self.clients)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(
            max(len(turn.new) + turn.answer for turn in turns) if turns[0].whole else _tokens(turns)
            for turns in self.clients
        )

    @property
    def sequences(self) -> list[int]:
        """Tokens of each client, those of a common prefix of its requests once."""
        return [_tokens(turns) for turns in self.clients]

    def run(self, engine: Measured) -> list[Served]:
        """Serves it. Requests are in the order in which they ended."""
        ready: deque[Flight] = deque((turns, 0, []) for turns in self.clients if turns)
        flying: dict[int, tuple[list[Turn], int, Request]] = {}
        found: list[Served] = []
        ended: list[Request] = []
        start = None
        while ready or flying:
            while ready and len(flying) < self.parallel:
                if ready[0][1] >= self.first and any(i < self.first for _, i, _ in flying.values()):
                    break  # earlier turns would take part of the measured time
                turns, index, history = ready.popleft()
                if index >= self.first and start is None:
                    engine.take_steps()
                    start = time.perf_counter()
                turn = turns[index]
                prompt = turn.new if turn.whole else history + turn.new
                request = Request(prompt, turn.answer)
                engine.submit(request)
                flying[id(request)] = turns, index, request
            if engine.busy:
                engine.step()
            for key in [key for key, (_, _, request) in flying.items() if request.finished]:
                turns, index, request = flying.pop(key)
                if index + 1 < len(turns):
                    ready.append((turns, index + 1, request.tokens))
                if start is None:
                    continue
                ended.append(request)
                if len(ended) == (self.window or self.measured):
                    found.append(Served(ended, ended, engine.take_steps(), start))
                    start, ended = request.token_times[-1], []
        return found


def _tokens(turns: Sequence[Turn]) -> int:
    total, before = 0, list[int]()
    for turn in turns:
        total += len(turn.new) + turn.answer
        if turn.whole:
            differing = (
                i for i, (a, b) in enumerate(zip(before, turn.new, strict=False)) if a != b
            )
            total -= next(differing, min(len(before), len(turn.new)))
            before = turn.new
    return total


def multi_turn(
    clients: int, rounds: int, request: int, question: int, answer: int, parallel: int, vocab: int,
    seed: int = 0, first: int = 0, rounds_of_window: int | None = None,
) -> Workload:  # fmt: skip
    """Conversations of random tokens, with the parameters of SGLang's HiCache benchmark.

    `benchmark/hicache/bench_multiturn.py`: --num-clients, --num-rounds, --request-length,
    --sub-question-input-length (of all rounds but the first), --output-length, --max-parallel.
    """
    rng = np.random.default_rng(seed)
    lengths = [request, *[question] * (rounds - 1)]
    return Workload(
        [
            [Turn(rng.integers(0, vocab, length).tolist(), answer) for length in lengths]
            for _ in range(clients)
        ],
        parallel,
        first,
        rounds_of_window and rounds_of_window * clients,
    )


def random_prompts(
    count: int, length: int, answer: int, parallel: int, vocab: int, seed: int = 0
) -> Workload:
    """One request for each client, without a common prefix."""
    return multi_turn(count, 1, length, 0, answer, parallel, vocab, seed=1000 + seed)


def trace(
    path: Path, sessions: int, max_blocks: int, scale: int, parallel: int, vocab: int,
    seed: int = 0, first: int = 0,
) -> Workload:  # fmt: skip
    """Whole sessions of a Mooncake trace, its lengths divided by `scale`, answers cut off.

    A session is the requests with the same second block: the first is common to most. Of each, the
    requests of up to `max_blocks` blocks.
    """
    size = BLOCK // scale
    groups: dict[int, list[Turn]] = {}
    blocks: dict[int, list[int]] = {}
    for line in path.read_text().splitlines():
        request = json.loads(line)
        ids = request["hash_ids"][:-1]  # the last one may be partial
        if not 2 <= len(ids) <= max_blocks:
            continue
        if ids[1] not in groups and len(groups) == sessions:
            continue
        for i in ids:
            if i not in blocks:
                blocks[i] = np.random.default_rng([2, i, seed]).integers(0, vocab, size).tolist()
        prompt = [token for i in ids for token in blocks[i]]
        answer = max(1, min(request["output_length"] // scale, MAX_ANSWER))
        groups.setdefault(ids[1], []).append(Turn(prompt, answer, whole=True))
    return Workload(list(groups.values()), parallel, first)


def cached_prefixes(prefixes: int, cached: int, new: int, vocab: int, seed: int = 0) -> Workload:
    """One request at a time: a prefix that others have evicted from HBM, and new tokens.

    Turn 0 computes the prefixes, which evict each other; with another seed only `new` differs.
    """
    clients = []
    tokens = np.random.default_rng([3, seed]).integers(0, vocab, (prefixes, new)).tolist()
    heads = np.random.default_rng(3).integers(0, vocab, (prefixes, cached)).tolist()
    for prefix, ending in zip(heads, tokens, strict=True):
        # The page of the last token is published with the next ones.
        turns = [Turn([*prefix, 0], 1, whole=True), Turn(prefix + ending, 2, whole=True)]
        clients.append(turns)
    return Workload(clients, 1, first=1)


@dataclass
class BesideLoads:
    """Running requests, during which others with evicted prefixes are admitted.

    Inter-token latencies are those of the running requests once all of them decode, so that no
    prefill of their own prompts is among them; all else is measured of the others.

    Attributes:
      prefixes: computed before.
      running: prompts of the running requests.
      answer: tokens of their answers.
      suffix: tokens after a prefix.
      every: steps between the admissions.
    """

    prefixes: list[list[int]]
    running: list[list[int]]
    answer: int
    suffix: int
    every: int

    def run(self, engine: Measured) -> list[Served]:
        """As `Workload.run`."""
        Workload([[Turn([*prefix, 0], 1)] for prefix in self.prefixes], 1).run(engine)
        running = [Request(prompt, self.answer) for prompt in self.running]
        for request in running:
            engine.submit(request)
        while not all(request.answer for request in running):
            engine.step()
        engine.take_steps()
        since, rng, others = time.perf_counter(), np.random.default_rng(0), list[Request]()
        step = 0
        while not all(request.finished for request in running):
            if step % self.every == 0:
                prefix = self.prefixes[step // self.every % len(self.prefixes)]
                others.append(Request(prefix + rng.integers(0, 256, self.suffix).tolist(), 2))
                engine.submit(others[-1])
            engine.step()
            step += 1
        while engine.busy:
            engine.step()
        return [Served(others, running, engine.take_steps(), since, since)]
