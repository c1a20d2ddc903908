"""An interpreter of lowered programs with started copies, which checks their buffer lifetimes.

It is independent of the library's decisions: it executes a lowered module with a buffer for each
value, takes the given branches, and compares the last use of each buffer of a copy with the known
end of the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.mlir import ir

START = ("jaxkv_start_copy", "jaxkv_start_copy_dma")
WAIT = "jaxkv_wait_copy"
ENQUEUING_WAIT = "jaxkv_wait_copy_dma"  # of a copy that its start may not enqueue entirely
MOVE_TICKET = "jaxkv_move_ticket"


class Buffer:
    def __init__(self) -> None:
        self.last_use: float = 0


class Copy:
    def __init__(self) -> None:
        self.buffers: list[tuple[Buffer, int]] = []  # each with its segment
        self.ended_at: dict[int, float] = {}  # by segment
        self.last_segment = 0
        self.deferred = False  # waits enqueue a part of it
        self.other_waits = 0  # that enqueue nothing


class Interpreter:
    """Runs a module once.

    Args:
      module: a lowered program.
      in_flight: arguments and segments of the transfer that it takes, if any.
      ticket: the argument with its ticket.
      choose: `choose(n)` picks one of n branches or a trip count.
    """

    def __init__(
        self,
        module: ir.Module,
        in_flight: list[tuple[int, int]],
        ticket: int | None,
        choose: Callable[[int], int],
    ) -> None:
        self.choose, self.time = choose, 0
        self.buffers: dict[Any, Buffer] = {}
        self.copies: list[Copy] = []
        self.copy_of: dict[Buffer, Copy] = {}  # by ticket
        self.functions = {
            ir.StringAttr(function.operation.attributes["sym_name"]).value: function.operation
            for function in module.body.operations
            if function.operation.name == "func.func"
        }
        main = self.functions["main"]
        arguments = list(main.regions[0].blocks[0].arguments)
        held = []
        aliasing: dict[int, Buffer] = {}  # by result
        attributes_of = ir.ArrayAttr(main.attributes["arg_attrs"])
        for argument, attributes in zip(arguments, attributes_of, strict=True):
            self.buffers[argument] = Buffer()
            donation = ir.DictAttr(attributes)
            if "tf.aliasing_output" in donation:
                result = ir.IntegerAttr(donation["tf.aliasing_output"]).value
                aliasing[result] = self.buffers[argument]
            if "tf.aliasing_output" not in donation and "jax.buffer_donor" not in donation:
                held.append(self.buffers[argument])
        if ticket is not None:
            before = Copy()
            before.buffers = [(self.buffers[arguments[i]], s) for i, s in in_flight]
            self.copies.append(before)
            self.copy_of[self.buffers[arguments[ticket]]] = before
        of_arguments = [self.buffers[argument] for argument in arguments]
        returned = self.block(main.regions[0].blocks[0])
        for i, buffer in enumerate(returned):
            # XLA copies an array that is returned twice, or that is an argument, but whose result
            # has the buffer of another.
            copied = buffer in of_arguments and aliasing.get(i, buffer) is not buffer
            if not copied and returned.count(buffer) == 1:
                held.append(buffer)
        for buffer in held:
            buffer.last_use = math.inf

    def found(self) -> Iterator[str]:
        """Buffers that are freed while a copy may still use them."""
        for number, copy in enumerate(self.copies):
            for place, (buffer, segment) in enumerate(copy.buffers):
                end = min((t for s, t in copy.ended_at.items() if s >= segment), default=math.inf)
                if buffer.last_use < end:
                    yield f"copy {number}, buffer {place} dies at {buffer.last_use}, {end=}"
            if copy.deferred and max(copy.ended_at, default=-1) < copy.last_segment:
                yield f"copy {number} is never enqueued entirely"
            if copy.deferred and copy.other_waits:
                yield f"copy {number} has a wait for what is not enqueued"

    def block(self, block: Any) -> list[Buffer]:
        """Executes a block; returns the operands of its terminator."""
        for operation in block.operations:
            operation = operation.operation
            operands = [self.buffers[operand] for operand in operation.operands]
            self.time += 1
            for buffer in operands:
                buffer.last_use = max(buffer.last_use, self.time)
            if operation.name in ("func.return", "stablehlo.return", "sdy.return"):
                return operands
            results = self.execute(operation, operands)
            self.buffers |= dict(zip(operation.results, results, strict=True))
        raise AssertionError("a block without a terminator")

    def execute(self, operation: Any, operands: list[Buffer]) -> list[Buffer]:
        match operation.name:
            case "stablehlo.optimization_barrier":
                return operands
            case "func.call":
                callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                return self.region(self.functions[callee].regions[0], operands)
            case "stablehlo.case" | "stablehlo.if":
                return self.region(operation.regions[self.choose(len(operation.regions))], [])
            case "stablehlo.while":
                for _ in range(self.choose(3)):
                    operands = self.region(operation.regions[1], operands)
                return operands
            case "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target in START:
                    return self.start(operation, operands, num_ids=1 + START.index(target))
                if target in (WAIT, ENQUEUING_WAIT):
                    return self.wait(operation, operands, enqueues=target == ENQUEUING_WAIT)
                if target == MOVE_TICKET:
                    ticket = Buffer()
                    self.copy_of[ticket] = self.copy_of[operands[0]]
                    return [ticket]
        return [Buffer() for _ in operation.results]

    def region(self, region: Any, operands: list[Buffer]) -> list[Buffer]:
        self.buffers |= dict(zip(region.blocks[0].arguments, operands, strict=True))
        return self.block(region.blocks[0])

    def start(self, operation: Any, operands: list[Buffer], num_ids: int) -> list[Buffer]:
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        to_dense = ir.DenseIntElementsAttr(config["copy"])[1]
        step = ir.IntegerAttr(config["segment_buffers"]).value
        num_written = len(operation.results) - 1
        written = operands[-num_written:] if to_dense else operands[num_ids:][:num_written]
        layers = written if to_dense else operands[num_ids + num_written :]
        copy, ticket = Copy(), Buffer()
        read = operands[0 if num_ids == 1 else num_ids :]
        of_layers = [i // step for i in range(len(layers))]
        is_swap = len(operands) == num_ids + 2 * len(layers)
        rest = [of_layers[-1]] * (len(read) - len(layers) * (1 + is_swap)) + of_layers * is_swap
        copy.buffers = list(zip(read, rest + of_layers, strict=True))
        copy.last_segment = of_layers[-1]
        copy.deferred = "deferred" in config and ir.BoolAttr(config["deferred"]).value
        if ir.BoolAttr(config["joined"]).value:
            copy.ended_at[of_layers[-1]] = self.time
        self.copies.append(copy)
        self.copy_of[ticket] = copy
        return [ticket, *written]

    def wait(self, operation: Any, operands: list[Buffer], *, enqueues: bool) -> list[Buffer]:
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        tickets = ir.IntegerAttr(config["first_array"]).value
        copy = self.copy_of[operands[0]]
        copy.other_waits += not enqueues
        copy.ended_at.setdefault(ir.IntegerAttr(config["segment"]).value, self.time)
        next_tickets = [Buffer() for _ in range(tickets)]
        self.copy_of |= dict.fromkeys(next_tickets, copy)
        return [*next_tickets, *operands[tickets - len(operation.results) :]]
