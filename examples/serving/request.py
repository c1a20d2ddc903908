"""A request of the engine, and the limits of all."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jaxkv

from .block_manager import Placement
from .sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler, which also determine the static shapes."""

    page_size: int  # tokens per page
    batch: int  # maximum number of running requests
    token_budget: int  # tokens of a step with prompts
    pages_per_request: int  # pages of the longest sequence
    copy_pages: int = 64  # pages loaded or stored during one step
    token_buckets: tuple[int, ...] = ()  # smaller bounds of steps with fewer tokens

    def __post_init__(self) -> None:
        if min(self.token_sizes) <= self.batch:
            sizes = f"token_buckets and token_budget, {self.token_sizes}"
            raise ValueError(f"batch={self.batch} must be less than {sizes}")

    @property
    def token_sizes(self) -> list[int]:
        """Static bounds of the tokens of steps with prompts; of others, `batch` is the bound."""
        return sorted({*self.token_buckets, self.token_budget})


@dataclass(eq=False)
class Request:
    """A prompt, its progress and its answer.

    Attributes:
      prompt: at least one token.
      max_new_tokens: length of the answer, unless it stops earlier.
      sampling: how tokens are chosen.
      stop: whether the answer ends with its last token; called for each token, unless it is the
        last of `max_new_tokens`.
      on_token: called after each token, the last one included, in the thread of the engine. If it
        or `stop` raises, the request ends, and `Engine.step` raises once the others have their
        tokens.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: Callable[["Request"], bool] = lambda request: False
    on_token: Callable[["Request"], None] = lambda request: None

    tokens: list[int] = field(init=False)  # prompt and answer
    finished: bool = field(default=False, init=False)
    in_flight: int = field(default=0, init=False)  # sampled, not yet read by the host
    computed: int = field(default=0, init=False)  # tokens with keys and values, once all steps ran
    keys: list[bytes] = field(default_factory=list, init=False)  # of full pages
    prefetch: jaxkv.OffloadPrefetch | None = field(default=None, init=False)
    published: int = field(default=0, init=False)  # pages
    slot: int = field(default=-1, init=False)
    placement: Placement | None = field(default=None, init=False)  # None: not running
    first_placement: Placement | None = field(default=None, init=False)
    stored: int = field(default=0, init=False)  # pages
    preemptions: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)  # after failed loads; earlier tokens do not count
    submitted_at: float = field(default=0.0, init=False)  # seconds, as the times below
    admitted_at: float = field(default=0.0, init=False)
    token_times: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def ready(self) -> bool:
        """Whether a step may compute more of the request."""
        load = self.placement.load if self.placement else None
        left = len(self.prompt) + self.max_new_tokens - len(self.tokens) - self.in_flight
        return (load is None or (load.issued and not load.failed)) and left > 0
