"""Owns the C++ of one function while it is written: variables, the open loop, what lives how long.

A function is written twice. The first pass puts every tensor into an array and notes which arrays are read, and when
last; the second leaves the others out and lets arrays that do not live together share memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.masks import MASKED, with_and_without
from npu_platform.triton.codegen.values import (
    DEAR,
    Falling,
    Index,
    Loop,
    LoopMustCloseError,
    LoopValue,
    Storage,
    Value,
    last,
    linear,
    make_loop,
    named,
    sources_of,
)
from npu_platform.triton.ir.operations import Block, Function, Operation
from npu_platform.triton.ir.types import Type

Access = Literal["load", "store"]
_MADE_BY_ONE = 10_000  # operation makes at most so many values and variables
STACK_BYTES = 256 * 1024
"""Arrays of a function that need more than this lie on the heap: a thread's stack may be of 8 MiB, or of less."""


@dataclass(slots=True)
class Plan:
    """What the first pass has found out: the last use of each value and storage, by number, in operations' counts."""

    last_use: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Repeated:
    """A loop of the kernel: what it uses from outside lives until its end."""

    born: int
    used: dict[int, int] = field(default_factory=dict)


class Writer:
    """Writes one function.

    Args:
        function: what to write.
        handlers: operation's name -> what writes it.
        addresses: ids of the integer operations whose results are offsets of addresses alone.
        plan: of the first pass, or None in it.
    """

    def __init__(
        self,
        function: Function,
        handlers: Mapping[str, Callable[[Writer, Operation], None]],
        addresses: set[int],
        plan: Plan | None,
    ) -> None:
        self.function = function
        self.handlers = handlers
        self.addresses = addresses
        self.plan = plan
        self.found = Plan()
        self.values: dict[str, Value] = {}
        self.blocks: dict[str, list[Storage]] = {}
        """Label -> the variables of its block's arguments."""
        self.lines: list[str] = []
        self.scalars: list[str] = []
        self.work = 0
        self.result_types = function.result_types
        self.clock = 0
        self._ordinal = (0, 0)
        self._born: dict[int, int] = {}
        self._loop: Loop | None = None
        self._repeated: list[_Repeated] = []
        self._inline = 0
        self._slots: list[tuple[Type, int]] = []  # of each: its type, the last use of who has it

    # --- operations -------------------------------------------------------------------------------------------

    def run(self, block: Block) -> None:
        """Write the operations of a block."""
        for operation in block.operations:
            self.clock += 1
            handler = self.handlers.get(operation.name)
            if handler is None:
                msg = f"Triton's operation {operation.name} has no meaning on npu, which runs kernels on the host."
                raise UnsupportedFeatureError(msg)
            handler(self, operation)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Write a part that runs several times: what it reads from outside must outlive it."""
        self.clock += 1
        frame = _Repeated(self.clock)
        self._repeated.append(frame)
        work, self.work = self.work, 0
        yield
        self.work = work + 8 * self.work  # a guess at the number of times
        self._repeated.pop()
        self.clock += 1
        for number, born in frame.used.items():
            if born < frame.born:
                self._note_use(number)

    def operands(self, operation: Operation) -> list[Value]:
        """Return the values that an operation reads."""
        return [self.values[name] for name in operation.operands]

    def emit(self, line: str) -> None:
        """Write a statement, after what the open loop does."""
        self.close()
        self.lines.append(line)

    # --- values -----------------------------------------------------------------------------------------------

    def read(self, value: Value, index: Index = ()) -> str:
        """Return the C++ expression of an element; raise LoopMustCloseError where the open loop must end before."""
        loop = self._loop
        if isinstance(value, LoopValue) and value.loop is loop and loop is not None:
            if index == loop.index:
                return value.local
            raise LoopMustCloseError
        if value.array is not None:
            self._use(value.number)
            self._use(value.array.number)
            same = loop is not None and loop.shape == value.type.shape and loop.index == index
            if loop is not None and not same:
                loop.gathered.add(value.array)
            return f"{value.array.name}[{loop.linear if same and loop else linear(value.type.shape, index)}]"
        return value.read(index)

    def read_mask(self, mask: Value, index: Index) -> str:
        """Return the C++ condition of an element of a mask, in a loop that is written without the mask, too."""
        condition = self.read(mask, index)
        if self._loop is None or mask.falls is None or mask.type.numel < MASKED:
            return condition
        falls = mask.falls(last(mask.type.shape)), mask.falls(index)
        number = self._loop.masks.setdefault(falls, len(self._loop.masks))
        return f"(all{number} || (some{number} && {condition}))"

    def scalar(self, value: Value) -> str:
        """Return the C++ expression of a scalar."""
        try:
            return self.read(value)
        except LoopMustCloseError:
            self.close()
            return self.read(value)

    def array(self, value: Value, element: str | None = None) -> str:
        """Return the name of an array that holds the elements of a tensor, converted if another type is asked for."""
        if element is not None and element != value.type.element:
            kind = value.type.of(element)
            copy = self.new_array(kind)
            self.copy(copy, Value(kind, lambda index: f"{kind.c}({self.read(value, index)})", value.sources))
            self.close()
            return copy.name
        self.close()
        if value.array is None:
            copy = self.new_array(value.type)
            self.copy(copy, value)
            self.close()
            return copy.name
        self._use(value.number)
        self._use(value.array.number)
        return value.array.name

    def define_lazily(
        self,
        name: str,
        kind: Type,
        read: Callable[[Index], str],
        of: Sequence[Value],
        cost: int,
        *,
        uniform: bool = False,
        rising: bool = False,
        falls: Callable[[Index], Falling] | None = None,
    ) -> None:
        """Let a name stand for an expression that is computed where it is used."""
        value = Value(kind, read, sources_of(of), min(DEAR, cost), uniform=uniform, rising=rising, falls=falls)
        self.values[name] = value

    def define(self, name: str, kind: Type, read: Callable[[Index], str], access: Access | None = None) -> None:
        """Compute a value: a scalar at once, a tensor in a loop that goes on while shapes are the same."""
        if not kind.shape:
            if access:
                self.close()
            self.values[name] = self._define_scalar(kind, read)
            return
        loop, text = self._in_loop(kind.shape, access, read)
        number = self.number()
        local = f"t{number}"
        loop.body.append(f"{kind.c} const {local} = {text};")
        value = LoopValue(kind, _unreadable, cost=DEAR, number=number, loop=loop, local=local)
        self._born[number] = loop.born
        loop.values.append(value)
        self.values[name] = value

    def define_argument(self, name: str, kind: Type, variable: str) -> None:
        """Let a name stand for an argument of the function, a scalar or an array."""
        self.define_stored(name, Storage(self.number(), variable, kind))

    def define_stored(self, name: str, storage: Storage) -> None:
        """Let a name stand for what a variable holds now."""
        self.values[name] = self.stored(storage)

    def stored(self, storage: Storage) -> Value:
        """Return the value that a variable holds now."""
        if not storage.type.shape:
            return Value(storage.type, lambda _index: storage.name, frozenset({storage}))
        number = self.number()
        self._born[number] = self.clock
        return Value(storage.type, _unreadable, frozenset({storage}), DEAR, storage, number)

    # --- variables --------------------------------------------------------------------------------------------

    def new_scalar(self, kind: Type) -> Storage:
        """Return a new variable of the function."""
        number = self.number()
        storage = Storage(number, f"s{number}", kind)
        self.scalars.append(f"{kind.c} {storage.name};")
        return storage

    def new_array(self, kind: Type, of: LoopValue | None = None) -> Storage:
        """Return a new array of the function, or `of` a loop's value.

        In the second pass its memory may be that of one no longer used.
        """
        number = self.number() if of is None else -of.number
        born = self.clock if of is None else self._born[of.number]
        self._born[number] = born
        self._note_use(number)
        slot = self._slot(kind, number, born)
        return Storage(number, f"a{slot}", kind, slot)

    def overwrite(self, value: Value) -> Storage | None:
        """Return the array of a value that nothing reads any more, for a new value; None: there is no such array.

        It stands for the array that the first pass made here, and lives as long.
        """
        array = value.array
        if self.plan is None or array is None or array.slot < 0 or self.plan.last_use.get(value.number) != self.clock:
            return None
        self._use(value.number)
        kind, until = self._slots[array.slot]
        self._slots[array.slot] = kind, max(until, self.plan.last_use.get(self.number(), self.clock))
        return array

    def new(self, kind: Type) -> Storage:
        """Return a new scalar or array."""
        return self.new_array(kind) if kind.shape else self.new_scalar(kind)

    def number(self) -> int:
        """Return a number that nothing of the function has yet: in both passes the same for what an operation makes."""
        clock, ordinal = self._ordinal
        ordinal = ordinal + 1 if clock == self.clock else 0
        self._ordinal = self.clock, ordinal
        return self.clock * _MADE_BY_ONE + ordinal + 1

    def declarations(self) -> tuple[list[str], int]:
        """Return the declarations of all variables, and the bytes that they need of an arena, 0 for none."""
        arrays, place = [], 0
        for kind, _ in self._slots:
            arrays.append((kind, place))
            place += -(-kind.numel * _size(kind) // 64) * 64
        if place <= STACK_BYTES:
            stack = [f"alignas(64) {kind.c} a{slot}[{kind.numel}];" for slot, (kind, _) in enumerate(arrays)]
            return [*self.scalars, *stack], 0
        heap = [
            f"{kind.c}* const __restrict a{slot} = reinterpret_cast<{kind.c}*>(arena + {begin});"
            for slot, (kind, begin) in enumerate(arrays)
        ]
        return [*self.scalars, *heap], place

    # --- loops ------------------------------------------------------------------------------------------------

    def close(self, in_order: bool = False) -> None:
        """End the open loop; what is read later goes into arrays. `in_order`: its steps depend on each other."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        kept: list[str] = []
        for value in loop.values:
            if self.plan is None or value.number in self.plan.last_use:
                value.array = self.new_array(value.type, value)
                value.sources = frozenset({value.array})
                kept.append(f"{value.array.name}[{loop.linear}] = {value.local};")
            value.loop = None
        hint = [] if in_order else ['_Pragma("GCC ivdep")']
        body = ["{", *loop.body, *kept, "}"]
        self.lines += with_and_without(loop, hint, body)

    def statement(self, shape: tuple[int, ...], write: Callable[[Index], str], access: Access | None = None) -> None:
        """Write a statement for each element of a shape."""
        if not shape:
            self.emit(write(()))
            return
        loop, text = self._in_loop(shape, access, write)
        loop.body.append(text)

    def copy(self, target: Storage, value: Value) -> None:
        """Write all elements of a value into a variable."""
        self._use(target.number)
        if not target.type.shape:
            text = self.scalar(value)
            self.emit(f"{target.name} = {text};")
            return
        if self._loop is not None and target in self._loop.gathered:
            self.close()
        loop, text = self._in_loop(target.type.shape, None, lambda index: self.read(value, index))
        if target in loop.gathered:
            self.close()
            loop, text = self._in_loop(target.type.shape, None, lambda index: self.read(value, index))
        loop.body.append(f"{target.name}[{loop.linear}] = {text};")

    def assign(self, targets: Sequence[Storage], values: Sequence[Value]) -> None:
        """Write values into variables as if at once: one may read what another writes."""
        pairs = [
            (target, value)
            for target, value in zip(targets, values, strict=True)
            if not (value.array is target or (not target.type.shape and value.sources == {target} and value.cost == 0))
        ]
        written = {target for target, _ in pairs}
        settled: list[tuple[Storage, Value]] = []
        for target, value in pairs:
            if value.sources & written:
                kept = self.new(value.type)
                self.copy(kept, value)
                self.close()
                settled.append((target, self.stored(kept)))
            else:
                settled.append((target, value))
        arrays = [pair for pair in settled if pair[0].type.shape]
        for target, value in [*arrays, *(pair for pair in settled if not pair[0].type.shape)]:
            self.copy(target, value)
        self.close()

    @contextlib.contextmanager
    def inline(self) -> Iterator[list[str]]:
        """Write scalar operations into the list that this gives, with variables of their own block."""
        self.close()
        lines, self.lines = self.lines, []
        self._inline += 1
        yield self.lines
        self._inline -= 1
        self.lines = lines

    # --- below ------------------------------------------------------------------------------------------------

    def _define_scalar(self, kind: Type, read: Callable[[Index], str]) -> Value:
        try:
            text = read(())
        except LoopMustCloseError:
            self.close()
            text = read(())
        if not self._inline:
            storage = self.new_scalar(kind)
            self.lines.append(f"{storage.name} = {text};")
            return self.stored(storage)
        number = self.number()
        self.lines.append(f"{kind.c} const s{number} = {text};")
        return named(kind, f"s{number}")

    def _in_loop(
        self, shape: tuple[int, ...], access: Access | None, write: Callable[[Index], str]
    ) -> tuple[Loop, str]:
        """Return the open loop of a shape and what is to be written into it; another loop is closed."""
        loop = self._loop
        # Lanes of a store may be lanes of a load before it: all loads come first. So for two stores.
        conflict = loop is not None and (
            loop.shape != shape
            or (access == "load" and loop.stores)
            or (access == "store" and (loop.loads or loop.stores))
        )
        if conflict:
            self.close()
        loop = self._open(shape)
        try:
            text = write(loop.index)
        except LoopMustCloseError:
            self.close()
            loop = self._open(shape)
            text = write(loop.index)
        loop.loads |= access == "load"
        loop.stores |= access == "store"
        return loop, text

    def _open(self, shape: tuple[int, ...]) -> Loop:
        if self._loop is None:
            self._loop = make_loop(shape, self.clock)
            size = 1
            for each in shape:
                size *= each
            self.work += size
        return self._loop

    def _slot(self, kind: Type, number: int, born: int) -> int:
        if self.plan is None:
            self._slots.append((kind, 0))
            return len(self._slots) - 1
        until = self.plan.last_use.get(number, born)
        for slot, (owned, free_after) in enumerate(self._slots):
            if owned.c == kind.c and owned.numel == kind.numel and free_after < born:
                self._slots[slot] = kind, until
                return slot
        self._slots.append((kind, until))
        return len(self._slots) - 1

    def _use(self, number: int) -> None:
        self._note_use(number)
        for frame in self._repeated:
            frame.used[number] = self._born.get(number, 0)

    def _note_use(self, number: int) -> None:
        self.found.last_use[number] = max(self.clock, self.found.last_use.get(number, 0))


def _unreadable(_index: Index) -> str:
    msg = "the value has neither an array nor an open loop"
    raise AssertionError(msg)


def _size(kind: Type) -> int:
    sizes = {"bool": 1, "int8_t": 1, "int16_t": 2, "f16": 2, "bf16": 2, "int32_t": 4, "float": 4}
    return 1 if kind.c.startswith("f8") else sizes.get(kind.c, 8)
