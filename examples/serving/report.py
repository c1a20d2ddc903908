"""Results of the runs, as tables and as a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import jaxkv

from .request import Request

Row = dict[str, Any]


@dataclass(eq=False)
class Turn(Request):
    """A turn of a conversation: its name, its number, and the prompt tokens of earlier turns."""

    name: str = ""
    index: int = 0
    known: int = 0


def row(turns: Sequence[Turn], spec: jaxkv.KVCacheSpec) -> Row:
    """Prompt tokens by source of their keys and values, bytes moved, and times.

    Recomputed are tokens of evicted pages, and of the last page of a turn if it was not full.
    TTFT is the mean time from admission to the batch until the first token is on the host,
    including loads. tokens/s counts answer tokens from the first admission to the last token.
    """
    placements = [turn.first_placement for turn in turns if turn.first_placement]
    hbm = [placement.found_in_hbm * spec.page_size for placement in placements]
    host = [placement.loaded * spec.page_size for placement in placements]
    lost = [max(0, turn.known - a - b) for turn, a, b in zip(turns, hbm, host, strict=True)]
    prompt, answer = (sum(len(getattr(t, part)) for t in turns) for part in ("prompt", "answer"))
    seconds = max(turn.token_times[-1] for turn in turns) - min(turn.admitted_at for turn in turns)
    return {
        "prompt": prompt,
        "in HBM": sum(hbm),
        "on host": sum(host),
        "recomputed": sum(lost),
        "new": prompt - sum(hbm + host + lost),
        "TTFT ms": 1e3 * mean(turn.token_times[0] - turn.admitted_at for turn in turns),
        "tokens/s": answer / seconds,
        "stored MiB": sum(turn.stored for turn in turns) * spec.page_bytes / 2**20,
        "loaded MiB": sum(placement.loaded for placement in placements) * spec.page_bytes / 2**20,
    }


def rounds(turns: Sequence[Turn], spec: jaxkv.KVCacheSpec) -> list[Row]:
    """One row for all first turns, one for all second ones, and so on."""
    indices = sorted({turn.index for turn in turns})
    groups = [[turn for turn in turns if turn.index == index] for index in indices]
    return [{"turn": group[0].index + 1} | row(group, spec) for group in groups]


def table(rows: Sequence[Row]) -> str:
    """Aligned text with the keys of the rows as header."""
    cells = [[*rows[0]], *([*row.values()] for row in rows)]
    text = [[f"{x:.1f}" if isinstance(x, float) else str(x) for x in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = (zip(line, widths, strict=True) for line in text)
    return "\n".join("  ".join(cell.rjust(width) for cell, width in line) for line in lines)


def plot(runs: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Time to first token of each run, and sources of the prompt tokens of the first run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in runs.items():
        left.plot([r["turn"] for r in rows], [r["TTFT ms"] for r in rows], "o-", label=name)
    name, rows = next(iter(runs.items()))
    bottom = [0] * len(rows)
    for source in ("in HBM", "on host", "recomputed", "new"):
        tokens = [r[source] for r in rows]
        right.bar([r["turn"] for r in rows], tokens, bottom=bottom, label=source)
        bottom = [a + b for a, b in zip(bottom, tokens, strict=True)]
    left.set(xlabel="turn", ylabel="time to first token, ms", ylim=(0, None))
    right.set(xlabel="turn", ylabel="prompt tokens", title=name)
    for axes in (left, right):
        axes.set_xticks([r["turn"] for r in rows])
        axes.legend()
    figure.savefig(path, dpi=150)
