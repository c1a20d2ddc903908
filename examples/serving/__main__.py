"""Serves conversations in three configurations and compares the answers.

  offload     few HBM pages; evicted pages are offloaded to the host pool and reloaded
  recompute   the same number of HBM pages, no host pool; evicted pages are recomputed
  all in HBM  HBM pages for all tokens

In float32 the tokens of the three runs must be equal, otherwise the exit code is 1. In bfloat16,
the default on GPUs, they are equal wherever batches are equal; the batches of the runs differ, and
round differently.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

import jaxkv
from jaxkv.offload import FileTier

from . import report
from .attention import IMPLEMENTATIONS
from .checkpoint import load_checkpoint
from .engine import Engine, Limits
from .model import Config, Params
from .presets import PRESETS, init_params
from .report import Turn
from .tokenizer import ByteTokenizer, QwenTokenizer, Tokenizer

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
TIER_BYTES = 1 << 36  # of files

Conversations = dict[str, list[str]]
Runs = dict[str, list[Turn]]


def parse(argv: Sequence[str] | None, on_cpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prompts = Path(__file__).with_name("conversations.jsonl")
    rounding = "in bfloat16 batches that differ round differently, which may change tokens"
    add = parser.add_argument
    add(
        "--prompts",
        type=input_file,
        metavar="FILE",
        default=prompts,
        help='JSONL of {"id", "turns"}',
    )
    add("--model", type=checkpoint, metavar="DIR", help="Qwen3 checkpoint; default: random weights")
    dtype = "float32" if on_cpu else "bfloat16"
    preset = "tiny" if on_cpu else "qwen3-0.6b"
    add("--preset", choices=[*PRESETS], default=preset, help="sizes of a model of random weights")
    add("--attention", choices=IMPLEMENTATIONS, help="default: the fastest for this device")
    add("--dtype", choices=("float32", "bfloat16"), default=dtype, help=rounding)
    add(
        "--num-hbm-pages",
        type=positive,
        metavar="N",
        help="default: twice the longest conversation",
    )
    add("--num-host-pages", type=positive, metavar="N", help="default: enough for everything")
    add(
        "--tier",
        type=folder,
        metavar="DIR",
        help="files below the host pool; the next run finds them",
    )
    add("--layout", choices=LAYOUTS, default="page_first_direct", help="of the host pool")
    add("--max-new-tokens", type=positive, metavar="N", default=24 if on_cpu else 64)
    add("--seed", type=seed, default=0, help="of the random weights, 32 bits")
    add(
        "--plot",
        type=plot_file,
        metavar="FILE.png",
        help="plot of the comparison (requires matplotlib)",
    )
    add("--json", type=output_file, metavar="FILE", help="write all figures and answers")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)  # argparse adds option and value
    return int(text)


def natural(text: str) -> int:
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def seed(text: str) -> int:
    if not 0 <= int(text) < 2**32:  # jax.random.key ignores further bits
        raise ValueError(text)
    return int(text)


def input_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} is not a readable file")
    return path


def checkpoint(text: str) -> Path:
    path = Path(text)
    for name in ("config.json", "tokenizer.json"):
        input_file(str(path / name))
    return path


def output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable")
    return path


def plot_file(text: str) -> Path:
    path = output_file(text)
    if not importlib.util.find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("requires matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(f"{text} must end with one of {', '.join(formats)}")
    return path


def folder(text: str) -> Path:
    """A directory, or where one can be made."""
    path = Path(text)
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{nearest} is not a writable directory")
    return path


def read_conversations(path: Path) -> Conversations:
    try:
        # JSON strings may contain what str.splitlines takes for ends of lines, such as U+2028.
        lines = [json.loads(line) for line in path.read_text().rstrip("\n").split("\n")]
        conversations = {line["id"]: line["turns"] for line in lines}
        if not lines or len(conversations) < len(lines):
            raise ValueError("empty file, or duplicate id")
        for turns in conversations.values():
            if (
                not isinstance(turns, list)
                or not turns
                or not all(isinstance(t, str) for t in turns)
            ):
                raise ValueError(f"turns must be a list of at least one string, got {turns!r}")
        return conversations
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise SystemExit(f"{path}: each line must have id and turns: {error!r}") from error


def show_progress(text: str) -> None:
    """Progress in one line of a terminal; no output if stderr is not one."""
    if sys.stderr.isatty():
        print(f"\r{text:<79}\r", end="", file=sys.stderr, flush=True)


def load_model(args: argparse.Namespace, on_cpu: bool) -> tuple[Config, Params]:
    if args.model:
        return load_checkpoint(args.model, args.dtype)
    config = PRESETS[args.preset]
    return config, init_params(config, args.seed, args.dtype)


def name_weights(args: argparse.Namespace) -> str:
    """Identifies the weights of the tier's blocks, also after files were replaced."""
    if not args.model:
        return f"{args.preset} {args.seed}"
    directory = args.model.resolve()
    files = [(path, path.stat()) for path in sorted(directory.glob("*.safetensors"))]
    sizes = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files]
    return f"{directory} {sizes}"


def plan_runs(
    args: argparse.Namespace,
    conversations: Conversations,
    tokenizer: Tokenizer,
    on_cpu: bool,
) -> tuple[Limits, dict[str, tuple[int, int]]]:
    """Limits of all engines, and the numbers of HBM and host pages of each run."""
    page_size, chunk = (16, 64) if on_cpu else (64, 256)
    pages = []  # for each conversation, without early stops
    for turns in conversations.values():
        prompts = [tokenizer.prompt(text, [-1] * place) for place, text in enumerate(turns)]
        length = sum(len(prompt) + args.max_new_tokens for prompt in prompts)
        pages.append(-(-length // page_size))
    few = args.num_hbm_pages or 2 * max(pages)
    if few < max(pages):
        raise SystemExit(f"--num-hbm-pages: the longest conversation needs {max(pages)} pages")
    limits = Limits(page_size, 4, chunk + 4, pages_per_request=max(pages))
    return limits, {
        "offload": (few, args.num_host_pages or sum(pages)),
        "recompute": (few, 0),
        "all in HBM": (max(few, sum(pages)), 0),
    }


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
                latest[name] = Turn(
                    history + tokenizer.prompt(turns[index], history),
                    max_new_tokens,
                    stop=lambda request: request.tokens[-1] in tokenizer.stop,
                    name=name,
                    index=index,
                    known=before.computed if before else 0,
                )
                engine.submit(latest[name])
                served.append(latest[name])
        while engine.busy:
            engine.step()
            left = len(engine.waiting) + len(engine.running)
            progress(f"turn {index + 1}, {left} conversations left")
        jaxkv.check_errors(engine.state, engine.pool)
    return served


class Comparison(NamedTuple):
    """All runs, by name.

    Attributes:
      tokens_equal: whether the answers equal those of run 'offload'.
      compared: one row for each run, without first turns if there are later ones.
      rounds: one row for each turn of the conversations.
    """

    tokens_equal: dict[str, bool]
    compared: list[report.Row]
    rounds: dict[str, list[report.Row]]


def compare(runs: Runs, spec: jaxkv.KVCacheSpec) -> Comparison:
    tokens = {name: [turn.answer for turn in turns] for name, turns in runs.items()}
    equal = {name: tokens[name] == tokens["offload"] for name in runs}
    compared = [
        {"run": name}
        | report.row([turn for turn in turns if turn.index] or turns, spec)
        | {"same tokens": "yes" if equal[name] else "NO"}
        for name, turns in runs.items()
    ]
    rounds = {name: report.rounds(turns, spec) for name, turns in runs.items()}
    return Comparison(equal, compared, rounds)


def answers(runs: Runs, spec: jaxkv.KVCacheSpec, tokenizer: Tokenizer) -> list[report.Row]:
    """One row for each answer."""
    return [
        {"run": name, "conversation": turn.name, "turn": turn.index + 1}
        | report.row([turn], spec)
        | {"tokens": turn.answer, "text": tokenizer.decode(turn.answer)}
        for name, turns in runs.items()
        for turn in turns
    ]


def main(argv: Sequence[str] | None = None) -> int:
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    args = parse(argv, on_cpu)
    conversations = read_conversations(args.prompts)
    tokenizer: Tokenizer = QwenTokenizer(args.model) if args.model else ByteTokenizer()
    config, params = load_model(args, on_cpu)
    limits, sizes = plan_runs(args, conversations, tokenizer, on_cpu)

    runs: Runs = {}
    from_tier = ""
    for name, (num_hbm_pages, num_host_pages) in sizes.items():
        print(f"{name}: {num_hbm_pages} HBM pages, {num_host_pages} host pages", file=sys.stderr)
        tiers: list[FileTier] = []

        def open_tiers(pool: jaxkv.HostPool, tiers: list[FileTier] = tiers) -> list[FileTier]:
            if args.tier:
                size = jaxkv.OffloadEngine.tier_block_bytes(pool)
                tiers.append(FileTier(args.tier, size, capacity_bytes=TIER_BYTES))
            return tiers

        engine = Engine(
            config, params, limits, num_hbm_pages, num_host_pages, args.layout, args.attention,
            tiers=open_tiers, weights=name_weights(args),
        )  # fmt: skip
        engine.warm_up()
        runs[name] = serve(engine, tokenizer, conversations, args.max_new_tokens, show_progress)
        engine.host.drain()
        for tier in tiers:
            tier.close()
        if tiers:
            totals = engine.host.metrics()
            read, written = (totals[f"kv_offload_{n}_blocks"] for n in ("promoted", "cascaded"))
            from_tier = f"{args.tier}: {read} pages read into the host pool, {written} written"

    found = compare(runs, engine.spec)
    print(
        f"Prompt tokens of run 'offload' by source of their keys and values, {device.device_kind}"
    )
    print(report.table(found.rounds["offload"]))
    print("\nAll runs, without first turns")
    print(report.table(found.compared))
    if from_tier:
        print(from_tier)
    print("TTFT: mean time from admission to the first token on the host, including loads")
    print("recomputed: evicted pages, and the last page of a turn if it was not full")
    if args.json:
        summary = {
            "platform": device.platform,
            "device_kind": device.device_kind,
            "options": {name: str(value) for name, value in vars(args).items()},
            "pages": {name: {"hbm": hbm, "host": host} for name, (hbm, host) in sizes.items()},
            **found._asdict(),
            "turns": answers(runs, engine.spec, tokenizer),
        }
        args.json.write_text(json.dumps(summary, indent=1))
    if args.plot:
        report.plot(found.rounds, args.plot)
    count = sum(len(turn.answer) for turn in runs["offload"])
    all_equal = all(found.tokens_equal.values())
    verdict = "equal those" if all_equal else "DIFFER from those"
    print(f"\nThe {count} tokens {verdict} of the runs without offload.")
    if args.dtype == "bfloat16":
        print("Equality is not claimed in bfloat16: batches differ, and so does their rounding.")
        return 0
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
