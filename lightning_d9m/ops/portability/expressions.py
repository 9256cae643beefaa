"""Numbers of formulas, and the C that formulas become.

A formula is a Python function of numbers. Its operators, and the functions below, name operations
that IEEE 754 or the arithmetic of whole numbers defines, so that each way to compute them gives the
same bits: C (``Code``), or Triton (``triton.formulas.TritonCode``), whose text torch operations
run, too. This module imports only the standard library, because a wheel's build loads it.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, ClassVar

Matrix = Annotated[Any, "at"]
"""An input with a number for each element ``i`` of each row ``r``, which begins ``at`` a place."""
Columns = Annotated[Any, "0"]
"""An input that each row reads."""
Rows = Annotated[Any, "r % period"]
"""An input with a number for each row, or for each channel of an image."""
# Annotated[Any, 3] stands for three numbers that are rounded to the type of the others.

# Operators of Python by their name in `operator`; each has its text in C.
_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "and_": "&", "or_": "|"}
_BINARY |= {"rshift": ">>", "lshift": "<<", "lt": "<", "gt": ">", "ge": ">=", "eq": "=="}
TEXTS = {name: f"{{}} {sign} {{}}" for name, sign in _BINARY.items()} | {
    "neg": "-{}",
    "invert": "!{}",
    "abs": "fabs({})",
    "copysign": "copysign({}, {})",
    "where": "{} ? {} : {}",
    "to_bits": "read_bits({})",
    "from_bits": "from_bits({})",
    "wide": "(double){}",
    "narrow": "(REAL){}",
    "lookup": "(int64_t)TWO_OVER_PI[{}]",
    "root": "({kind})sqrt({})",
    "rest": "fmod({}, {})",
    "length": "(REAL)n",
    "total": "NAME(add_row)({}, n)",
    "greatest": "NAME(find_greatest)({}, n)",
}
_KINDS = dict.fromkeys(("lt", "gt", "ge", "eq"), "_Bool") | {
    "to_bits": "int64_t",
    "lookup": "int64_t",
    "from_bits": "double",
    "wide": "double",
    "narrow": "REAL",
    "length": "REAL",
}
_OF_ROWS = ("total", "greatest", "length")
# Inputs by their place in a row, and numbers.
_PLACES = {"at": "{}[i]", "0": "{}[i]", "r % period": "*{}", "number": "(REAL)g->{}[{}]"}


class Number:
    """A number of a formula; a subclass says what an operation gives."""

    def apply(self, operation: str, *operands: Any) -> Any:
        """Return the result of an operation, of which this is one operand."""
        raise NotImplementedError


def operation(name: str) -> Callable[..., Any]:
    """Return the function that applies an operation to numbers, of which one is a ``Number``."""

    def apply(*operands: Any) -> Any:
        return next(one for one in operands if isinstance(one, Number)).apply(name, *operands)

    return apply


for _name in ("neg", "invert", "abs", *_BINARY):
    _apply = operation(_name)
    setattr(Number, f"__{_name.strip('_')}__", _apply)
    if _name in _BINARY:
        # For a number of Python on the left side, as in `1 - x`.
        setattr(Number, f"__r{_name.strip('_')}__", lambda a, b, apply=_apply: apply(b, a))


@dataclass(eq=False)
class Code(Number):
    """A number in C.

    Attributes:
        program: All numbers of the formula in order; this one is appended.
        kind: Its type.
        text: What computes it.
        operands: The numbers in the text.
        each: Whether it differs between the elements of a row.
        of_rows: Whether it takes a whole row.
        texts: What computes the result of each operation.
        form: A statement that computes it; then those that store it, for an element and for a row.
    """

    program: "list[Code]" = field(repr=False)
    kind: str
    text: str
    operands: "tuple[Code, ...]" = ()
    each: bool = False
    of_rows: bool = False
    texts: ClassVar = TEXTS
    form: ClassVar = ("const {0.kind} {0.name} = {0.text};", "{}[i] = {};", "*{} = {};")

    def __post_init__(self) -> None:
        # A statement for each operation: texts of names need no parentheses. A compiler may still
        # join two statements, which `-ffp-contract=off` prevents.
        self.name = f"v{len(self.program)}"
        self.program.append(self)

    def apply(self, operation: str, *operands: Any) -> "Code":
        """Append the result of an operation to the program."""
        codes = tuple(one for one in operands if isinstance(one, Code) and operation != "length")
        kinds = {one.kind for one in codes} - {"_Bool"}
        # C would convert one of two types without a word, and Triton another one.
        assert len(kinds) <= 1, (operation, kinds)
        like = kinds.pop() if kinds else "double" if operation == "where" else "_Bool"
        names = [one.name if isinstance(one, Code) else self.write(one, like) for one in operands]
        text = self.texts[operation].format(*names, kind=like)
        of_rows = operation in _OF_ROWS
        each = any(one.each for one in codes) and not of_rows
        return type(self)(self.program, _KINDS.get(operation, like), text, codes, each, of_rows)

    @staticmethod
    def write(number: float, kind: str) -> str:
        """Return a constant."""
        if kind == "int64_t":
            return f"{number}LL"
        # Hexadecimal numbers of C99 are exact; a compiler would have to round a decimal one.
        special = "NAN" if math.isnan(number) else "INFINITY" if number > 0 else "-INFINITY"
        return f"({kind}){float(number).hex() if math.isfinite(number) else special}"


def list_needed(results: Iterable[Code], known: Container[Code] = ()) -> list[Code]:
    """Return the numbers that others are computed from, in order, up to those that are known."""
    needed = {*results}
    program = next(iter(needed)).program if needed else []
    for one in reversed(program):
        if one in needed and one not in known:
            needed |= {*one.operands}
    return [one for one in program if one in needed]


def declare(results: Iterable[Code], known: Container[Code]) -> list[str]:
    """Return the statements that compute numbers from those that are known."""
    needed = (one for one in list_needed(results, known) if one not in known)
    return [one.form[0].format(one) for one in needed]


def write_row(
    outputs: dict[str, Code], add_up: Callable[[Code, Code, Container[Code]], list[str]]
) -> tuple[list[str], list[str], list[str]]:
    """Return the statements of a row: before its elements, for each of them, and after them.

    ``add_up`` returns those that compute a number of a whole row from its elements.
    """
    lines, known = list[str](), set[Code]()
    for one in list_needed(outputs.values()):
        if not one.each:
            is_total = one.of_rows and one.operands
            lines += add_up(one, one.operands[0], known) if is_total else [one.form[0].format(one)]
            known.add(one)
    each, after = declare([one for one in outputs.values() if one.each], known), list[str]()
    for name, one in outputs.items():
        (each if one.each else after).append(one.form[2 - one.each].format(name, one.name))
    return lines, each, after


class RowKernel:
    """A formula of the elements of rows, which returns its outputs by their names.

    Attributes:
        inputs: Where a row begins in each input; how many numbers it is if it has no rows.
        outputs: The numbers that are returned; one with the name of an input replaces it.
        fresh: The names of the other outputs.
        in_rows: Whether rows count; otherwise all elements are one row, which threads share.
    """

    def __init__(self, formula: Callable[..., dict[str, Any]], absent: Sequence[str] = ()) -> None:
        self.formula = formula
        self.inputs = {
            name: one.annotation.__metadata__[0]
            for name, one in signature(formula).parameters.items()
            if name not in absent
        }
        self.outputs = self.trace(Code, _PLACES)
        program = next(iter(self.outputs.values())).program
        self.fresh = [name for name in self.outputs if name not in self.inputs]
        of_rows = any(one.of_rows for one in program)
        self.in_rows = of_rows or not {"0", "r % period"}.isdisjoint(self.inputs.values())

    def trace(self, number: type[Code], places: dict[str, str]) -> dict[str, Code]:
        """Return the outputs as numbers of a class, by the texts of inputs."""
        program, given = list[Code](), dict[str, Any]()
        for name, place in self.inputs.items():
            if isinstance(place, int):
                texts = (places["number"].format(name, k) for k in range(place))
                given[name] = [number(program, "REAL", text) for text in texts]
            else:
                each = place in ("at", "0")
                given[name] = number(program, "REAL", places[place].format(name), (), each)
        return self.formula(**given)

    def write(self, name: str) -> str:
        """Return the kernel in C, which computes rows, or elements, from ``begin`` to ``end``."""
        members = dict.fromkeys(self.inputs, "const REAL *")
        members |= dict.fromkeys(self.outputs, "REAL *")
        places = {one: "at" if code.each else "r" for one, code in self.outputs.items()}
        places = self.inputs | places
        fields = " ".join(
            f"double {one}[{places[one]}];" if isinstance(places[one], int) else f"{kind}{one};"
            for one, kind in members.items()
        )
        # Threads share out rows where rows are summed, and else elements: a tensor may be one row.
        rows = "for (long r = begin; r < end; r++) { const long from = 0, to = n, at = r * n;"
        elements = "{ const long r = 0, from = begin, to = end, at = 0; (void)r;"
        lines, buffers = self._write_row()
        # An output that replaces an input is its only pointer, so no two of them overlap.
        pointers = (
            f"{kind}restrict {one} = g->{one} + {places[one]};"
            for one, kind in members.items()
            if isinstance(places[one], str)
        )
        return "\n".join(
            (
                f"struct NAME({name}) {{ long n, period; {fields} }};",
                f"void NAME({name})(const void *given, long begin, long end) {{",
                f"const struct NAME({name}) *g = given;",
                "const long n = g->n, period = g->period; (void)n; (void)period;",
                f"REAL *scratch = get_scratch(sizeof(REAL) * {buffers} * n);" if buffers else "",
                rows if self.in_rows else elements,
                *pointers,
                *lines,
                "} }\n",
            )
        )

    def _write_row(self) -> tuple[list[str], int]:
        """Return the statements of a row: what is summed is stored, all else computed again."""
        loop, buffers = "for (long i = from; i < to; i++) {{ {} }}", list[str]()

        def add_up(one: Code, row: Code, known: Container[Code]) -> list[str]:
            # `add_row` reads memory. What is only needed for each element is computed again, as
            # that takes less time than to write it and to read it.
            lines, buffer = list[str](), f"row{len(buffers)}"
            if row.operands:
                lines.append(f"REAL *restrict {buffer} = scratch + {len(buffers)} * n;")
                store = [*declare([row], known), f"{buffer}[i] = {row.name};"]
                lines.append(loop.format(" ".join(store)))
                buffers.append(buffer)
                row.text, row.operands = f"{buffer}[i]", ()  # read from there from now on
            one.text = one.text.replace(row.name, row.text.removesuffix("[i]"))
            return [*lines, one.form[0].format(one)]

        lines, each, after = write_row(self.trace(Code, _PLACES), add_up)
        return [*lines, loop.format(" ".join(each)), *after], len(buffers)
