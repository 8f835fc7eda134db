"""Owns the reading of TTIR's text.

Triton's Python bindings give neither floating-point constants nor blocks, so the text is read. It is regular: an
operation a line, regions in braces, types behind the last colon. The grammar is MLIR's, with Triton's own formats.
"""

from __future__ import annotations

import re

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.ir.operations import Block, Function, Operation, Region
from npu_platform.triton.ir.types import Type, parse_type

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_QUOTED_NAME = re.compile(r'"([a-z_]+\.[\w.]+)"(?=\()')
_RESULTS = re.compile(r"((?:%[\w-]+(?::\d+)?(?:, )?)+) = ")
_NAME = re.compile(r"[\w.]+")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_BRACES = re.compile(r"<?\{([^{}]*)\}>?")
_LABEL = re.compile(r"\^(\w+)(?:\((.*)\))?:")
_SUCCESSOR = re.compile(r"\^(\w+)(?:\(([^)]*)\))?")
_FOR = re.compile(
    r"(?P<unsigned>unsigned )?(?P<variable>%[\w-]+) = (?P<bounds>%\S+ to %\S+ step %\S+)"
    r"(?: iter_args\((?P<captures>.*?)\) -> (?P<types>\(.*?\)))?\s*(?:: (?P<type>\w+))?$"
)
_ESCAPE = re.compile(r"\\([0-9A-Fa-f]{2}|.)")


def parse_module(text: str) -> list[Function]:
    """Return the functions of a module; raise UnsupportedFeatureError for what is not TTIR."""
    reader = _Reader(text)
    functions = []
    while (line := reader.next()) is not None:
        if line.startswith("tt.func"):
            functions.append(reader.function(line))
    if not functions:
        msg = "The module has no tt.func: kernels on npu are compiled from Triton's TTIR, not from a later stage."
        raise UnsupportedFeatureError(msg)
    return functions


def split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        if character in "<([{":
            depth += 1
        elif character in ">)]}" and text[place - 1] != "-":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()] if text[begin:].strip() else parts


class _Reader:
    """The lines of a module, read once from the first to the last."""

    def __init__(self, text: str) -> None:
        self.lines = [line.strip() for line in text.splitlines()]
        self.place = 0
        self.strings: list[str] = []

    def next(self) -> str | None:
        """Return the next line that says something, its strings replaced by their numbers."""
        while self.place < len(self.lines):
            line = self.lines[self.place]
            self.place += 1
            if line and not line.startswith(("#", "//")):
                return _STRING.sub(self._keep, _QUOTED_NAME.sub(r"\1", line)).partition(" // ")[0].rstrip()
        return None

    def function(self, line: str) -> Function:
        """Read a function whose first line this is."""
        start = line.index("(")
        end = _closing(line, start)
        arguments = [
            (name, parse_type(_BRACES.sub("", text)))
            for name, _, text in (each.partition(": ") for each in split(line[start + 1 : end]))
        ]
        rest = line[end + 1 :].partition(" attributes ")[0].rstrip("{ ")
        name = self._restored(line[line.index("@") + 1 : start])
        body, _ = self.region()
        return Function(name, "private" not in line[: line.index("@")], arguments, _arrow_types(rest), body)

    def region(self) -> tuple[Region, str]:
        """Read blocks up to the closing brace; return them and the line of that brace."""
        blocks = [Block()]
        while (line := self.next()) is not None:
            if line.startswith("}"):
                return blocks, line
            if match := _LABEL.match(line):
                arguments = [_argument(text) for text in split(match[2] or "")]
                if blocks == [Block()]:
                    blocks = []
                blocks.append(Block(match[1], arguments))
            else:
                blocks[-1].operations.append(self.operation(line))
        msg = "The text of the module ends within a function."
        raise UnsupportedFeatureError(msg)

    def operation(self, line: str) -> Operation:
        """Read an operation, with its regions."""
        results = []
        if match := _RESULTS.match(line):
            results = _result_names(match[1])
            line = line[match.end() :]
        name = _NAME.match(line)
        assert name, f"no operation: {line}"
        operation = Operation(name[0], results)
        text = line[name.end() :]
        if text.endswith("{"):
            text = text.removesuffix("{").removesuffix("(")
            closing = ") {"
            while closing.endswith("{"):
                region, closing = self.region()
                operation.regions.append(region)
            text += " " + closing.lstrip("})").strip()
        self._fill(operation, text)
        return operation

    def _fill(self, operation: Operation, text: str) -> None:
        for braces in _BRACES.findall(text):
            for pair in split(braces):
                key, _, value = pair.partition(" = ")
                operation.attributes[key] = self._restored(value)
        text = _BRACES.sub("", text).strip()
        if operation.name.startswith("cf."):
            operation.successors = [
                (match[1], _VALUE.findall((match[2] or "").partition(" : ")[0])) for match in _SUCCESSOR.finditer(text)
            ]
            operation.operands = _VALUE.findall(text.partition("^")[0])
            return
        words, types = _LOOPS.get(operation.name, _words_and_types)(operation, text)
        operation.operands = _VALUE.findall(words)
        operation.words = words
        operation.strings = [self.strings[int(number)] for number in re.findall(r'"(\d+)"', words)]
        operation.result_types = _result_types(operation, types)

    def _keep(self, match: re.Match[str]) -> str:
        self.strings.append(_ESCAPE.sub(_unescaped, match[1]))
        return f'"{len(self.strings) - 1}"'

    def _restored(self, value: str) -> str:
        match = re.fullmatch(r'"(\d+)"', value)
        return self.strings[int(match[1])] if match else value


def _words_and_types(_operation: Operation, text: str) -> tuple[str, str]:
    words, colon, types = text.rpartition(" : ")
    if colon:
        return words, types
    if text.startswith(": "):
        return "", text.removeprefix(": ")
    words, arrow, types = text.partition(" -> ")  # of what has no operands
    return words, arrow + types


def _for(operation: Operation, text: str) -> tuple[str, str]:
    """Read ``%i = %a to %b step %c iter_args(%x = %y) -> (f32) : i32``; the bounds are the operands."""
    match = _FOR.match(text)
    assert match, f"no loop: {text}"
    operation.captures = _captures(match["captures"] or "")
    operation.attributes["unsigned"] = "true" if match["unsigned"] else "false"
    operation.attributes["variable"] = match["variable"]
    operation.attributes["type"] = match["type"] or "index"
    return match["bounds"], f"-> {match['types']}" if match["types"] else ""


def _while(operation: Operation, text: str) -> tuple[str, str]:
    """Read ``(%x = %y) : (f32) -> (f32)``, which has no operands beside the captures."""
    words, _, types = text.partition(" : ")
    operation.captures = _captures(words.strip("() "))
    return "", types


def _if(_operation: Operation, text: str) -> tuple[str, str]:
    words, arrow, types = text.partition(" -> ")
    return words, arrow + types


_LOOPS = {"scf.for": _for, "scf.while": _while, "scf.if": _if}


def _captures(text: str) -> list[tuple[str, str]]:
    pairs = (pair.partition(" = ") for pair in split(text))
    return [(name, value) for name, _, value in pairs if value]


def _result_types(operation: Operation, types: str) -> list[Type]:
    if not operation.results:
        return []
    if "->" in types:
        found = _arrow_types(types)
        return found * len(operation.results) if len(found) == 1 else found
    if " to " in types:
        return [parse_type(types.partition(" to ")[2])]
    first, *_, last = [parse_type(text) for text in split(types)] * 2 or [Type("i1")] * 2  # true and false have no type
    special = {
        "arith.cmpi": first.of("i1"),
        "arith.cmpf": first.of("i1"),
        "arith.select": last,
        "tt.load": first.of(first.pointee) if first.is_pointer else first,
    }
    return [special.get(operation.name, first)] * len(operation.results)


def _arrow_types(text: str) -> list[Type]:
    """Return the types behind an arrow: none, one, or several in parentheses."""
    _, arrow, types = text.rpartition("->")
    if not arrow:
        return []
    types = types.strip()
    if types.startswith("("):
        types = types[1 : _closing(types, 0)]
    return [parse_type(each) for each in split(types)]


def _result_names(text: str) -> list[str]:
    names: list[str] = []
    for part in text.split(", "):
        name, _, count = part.partition(":")
        names += [f"{name}#{number}" for number in range(int(count))] if count else [name]
    return names


def _argument(text: str) -> tuple[str, Type]:
    name, _, kind = text.partition(": ")
    return name.strip(), parse_type(kind)


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    msg = f"no closing parenthesis in: {text}"
    raise UnsupportedFeatureError(msg)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 16)) if len(code) == 2 else code
