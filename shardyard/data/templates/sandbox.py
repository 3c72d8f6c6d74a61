"""A chat template in a closed sandbox: what it renders is transformers' text, what it may use is bounded.

Chat templates come with models and from users, so their text is not trusted. Over jinja2's immutable sandbox
(no attribute with an underscore, nothing of the data can be changed) this one

- knows only the filters and methods listed here, none of which can make much from little unseen;
- meters a rendering: each loop turn, call, filter and operation costs a step, each value its size. The whole
  may cost ``BUDGET`` and ``BUDGET_PER_INPUT`` times the size of what is rendered, one value and the output
  ``VALUE`` and ``VALUE_PER_INPUT`` times, so that the same row is refused on every machine;
- stops after ``SECONDS`` of processor time of its thread, for what is slow at a small cost.

Loops, literals, slices, comparisons and ``~`` are metered by calls that are put into the parsed template;
operators, calls, filters and tests where jinja2 lets a sandbox meet them.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

from jinja2 import TemplateSyntaxError, Undefined, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.chat_language import (
    GenerationTag,
    TemplateDict,
    TemplateNamespace,
    raise_exception,
    strftime_now,
    tojson,
)
from shardyard.data.templates.metering import Metering

TEMPLATE_CHARS = 1 << 17
"""Largest template; the largest of a known family has 20,000 characters."""
BUDGET, BUDGET_PER_INPUT = 64 << 20, 256
VALUE, VALUE_PER_INPUT = 4 << 20, 16
SECONDS = 10.0

_ITEM = 64
"""The cost of a step and of a value beside its characters: about what an object takes in memory."""
_INT_BITS = 1 << 14
_WIDTH = 1000
"""Widest padding and indentation that a template may ask for."""

_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort "
    "string sum title trim unique upper wordcount".split()
)
_SHALLOW = frozenset(
    "attr count d default first items last length list map reject rejectattr reverse select "
    "selectattr".split()
)
"""Filters that hand on values, or look at them one by one, without going into them."""
_STR_METHODS = frozenset(
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii isdecimal "
    "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper".split()
)
_DICT_METHODS = frozenset("get items keys values".split())
_OF_JINJA = (LoopContext, Macro, Namespace, Cycler, Joiner, TemplateReference, BlockReference, Undefined)
_CONTAINERS = (list, tuple, dict, set, type({}.keys()), type({}.values()), type({}.items()))
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


class Stopped(NotUsable):
    """The template used more time or memory than it may."""


class ChatTemplateText:
    """A compiled chat template; can be sent to other processes, and is used by one thread at a time.

    Raises:
        NotUsable: the text is too long or not a template; with jinja2's words and the line.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > TEMPLATE_CHARS:
            raise NotUsable(f"it has {len(text)} characters; at most {TEMPLATE_CHARS} are read")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(text)
        except TemplateSyntaxError as error:
            raise NotUsable(f"line {error.lineno}: {_first_line(error)}") from None
        except Exception as error:  # whatever an untrusted text makes of the compiler
            raise NotUsable(f"it cannot be compiled: {_first_line(error)}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplateText, (self._text,)

    def render(self, **variables: Any) -> str:
        """The text; ``variables`` hold JSON values only.

        Raises:
            Stopped: it reached a limit.
            NotUsable: the template refuses these values, fails on them, or asks for what is withheld; in the
                template's own words, or jinja2's.
        """
        environment = self._environment
        chunks: list[str] = []
        try:
            room = environment.begin(variables)
            for chunk in self._template.generate(**variables):
                chunks.append(chunk)
                room -= len(chunk)
                if room < 0:
                    raise Stopped("the chat template was stopped: it writes too much text")
        except Stopped:
            raise
        except RecursionError:
            raise Stopped("the chat template was stopped: it calls itself, or nests, too deeply") from None
        except Exception as error:  # whatever an untrusted text does; its words go into the report
            raise NotUsable(f"the chat template refuses it: {_first_line(error)}") from None
        return "".join(chunks)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2 as transformers sets it up for chat templates, with a meter."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self.written,
            optimized=False,
            cache_size=0,
        )
        self.begin({})
        kept = {name: function for name, function in self.filters.items() if name in _FILTERS}
        kept["tojson"] = tojson
        self.filters = {name: self._metered_filter(name, function) for name, function in kept.items()}
        self.tests = {name: self._metered_test(function) for name, function in self.tests.items()}
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=strftime_now,
            namespace=TemplateNamespace,
            dict=TemplateDict(),
        )
        del self.globals["lipsum"]

    # The meter

    def begin(self, variables: dict[str, Any]) -> int:
        """Start to meter a rendering of these values; gives the room of one value and of the output."""
        size = _size(variables, BUDGET << 10)
        self._left = BUDGET + BUDGET_PER_INPUT * size
        self._room = VALUE + VALUE_PER_INPUT * size
        self._steps = 0
        self._stop_at = time.thread_time() + SECONDS
        return self._room

    def step(self, cost: int = 0) -> None:
        """One step of the template; also stands in front of the body of every loop."""
        self._left -= _ITEM + cost
        self._steps += 1
        if self._left < 0:
            raise Stopped("the chat template was stopped: it takes too many steps, or too much memory")
        if not self._steps & 15 and time.thread_time() > self._stop_at:
            raise Stopped(f"the chat template was stopped: it ran longer than {SECONDS:g} s")

    def charge(self, size: int) -> None:
        """Pay for a value before it is made."""
        if size > self._room:
            raise Stopped("the chat template was stopped: it makes a value that is too large")
        self.step(size)

    def measured(self, value: Any) -> Any:
        """``value``, if it is not larger, as text, than a value may be."""
        if isinstance(value, _CONTAINERS):
            _size(value, self._room)
        self.step()
        return value

    def made(self, value: Any) -> Any:
        """``value``, paid for; its parts exist already."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, _CONTAINERS):
            self.charge(_ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise Stopped("the chat template was stopped: it makes a number that is too large")
        return value

    def literal(self, value: Any) -> Any:
        """A list, tuple or mapping that the template has just put together."""
        return self.made(self.measured(value))

    def written(self, value: Any) -> Any:
        """Jinja2's ``finalize``: called with each value before it is written as text."""
        self.charge(_size(value, self._room))
        return value

    def joined(self, *parts: Any) -> str:
        """The operator ``~``."""
        self.charge(sum(_size(part, self._room) for part in parts))
        return "".join(map(str, parts))

    # Where jinja2 lets a sandbox in

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = Metering().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        room = self._room
        if operator == "%" and isinstance(left, str):
            self._check_printf(left, right)
        elif operator == "+" and not isinstance(left, list):
            self.charge(_size(left, room) + _size(right, room))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.made(1 << min(left.bit_length() * abs(right), _INT_BITS))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # put in by Metering
        __self.step()
        if isinstance(owner, str) and isinstance(__obj, BuiltinMethodType | MethodType):
            args = __self._check_method(owner, __obj.__name__, args)
        else:
            for value in chain(
                args, (v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars"))
            ):
                __self.measured(value)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, dict):
            return attr in _DICT_METHODS
        return isinstance(obj, _OF_JINJA)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        pattern = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            fields = 0
            for _, field, spec, _ in string.Formatter().parse(pattern):
                fields += field is not None
                if spec and ("{" in spec or any(int(n[:9]) > _WIDTH for n in re.findall(r"\d+", spec))):
                    raise Stopped("the chat template was stopped: it pads text too far")
            given = sum(_size(value, self._room) for value in chain(args, kwargs.values()))
            self.charge(len(pattern) + fields * (given + _WIDTH))
            return self.made(inner(*args, **kwargs))

        return checked

    # What single operations may make

    def _check_printf(self, pattern: str, values: Any) -> None:
        directives = _PRINTF.findall(pattern)
        for number in chain.from_iterable(directives):
            if number == "*" or (number and int(number[:9]) > _WIDTH):
                raise Stopped("the chat template was stopped: it pads text too far")
        self.charge(len(pattern) + len(directives) * (_size(values, self._room) + _WIDTH))

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self.made(1 << min(left.bit_length() + right.bit_length(), 2 * _INT_BITS))
            return
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                size = len(sequence) if isinstance(sequence, str) else _size(sequence, self._room)
                self.charge(size * max(times, 0))

    def _check_method(self, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pay for a method of a text; gives its arguments, an iterator among them as a list."""
        if name == "replace":
            self._check_replace(text, *args[:2])
        elif name == "join" and args:
            items = self._listed(args[0])
            self.charge(_size(items, self._room) + len(text) * len(items))
            return (items, *args[1:])
        elif name in ("split", "rsplit", "splitlines"):
            known = bool(args) and isinstance(args[0], str) and args[0] != ""
            pieces = text.count(args[0]) if known else len(text) // 2
            self.charge(min(_ITEM * pieces, self._room) + len(text))
        elif name in ("partition", "rpartition"):
            self.charge(len(text))
        return args

    def _check_replace(self, text: str, old: Any = "", new: Any = "") -> None:
        old, new = str(old), str(new)
        found = text.count(old) if old else len(text) + 1
        self.charge(len(text) + found * len(new))

    def _listed(self, values: Any) -> list[Any]:
        items = list(values)
        self.charge(_ITEM * len(items))
        return items

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes first
        check = getattr(self, f"_check_filter_{name}", None)

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.step()
            head, (value, *rest) = args[:passed], args[passed:] or (None,)
            if name not in _SHALLOW:
                if isinstance(value, GeneratorType):
                    value = self._listed(value)
                self.charge(_size(value, self._room))
            if check is not None:
                check(value, *rest, **kwargs)
            return self.made(function(*head, value, *rest, **kwargs))

        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any) -> Any:
            for value in args if len(args) > 1 else ():
                self.measured(value)
            return function(*args)

        return metered

    def _check_filter_join(self, value: Any, d: Any = "", attribute: Any = None) -> None:
        self.charge(_size(d, self._room) * len(value))

    def _check_filter_replace(self, value: Any, old: Any, new: Any, count: Any = None) -> None:
        self._check_replace(str(value), old, new)

    def _check_filter_format(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self._check_printf(str(value), [*args, *kwargs.values()])

    def _check_filter_escape(self, value: Any) -> None:
        self.charge(5 * _size(value, self._room))

    _check_filter_e = _check_filter_escape

    def _check_filter_indent(
        self, value: Any, width: Any = 4, first: Any = False, blank: Any = False
    ) -> None:
        self.charge(len(value.splitlines()) * _width(width))

    def _check_filter_round(self, value: Any, precision: Any = 0, method: Any = "common") -> None:
        _width(abs(precision))

    def _check_filter_sum(self, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
        if not isinstance(start, int | float):
            raise Stopped("the chat template was stopped: it sums what are not numbers")

    def _check_filter_tojson(
        self, x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, **_: Any
    ) -> None:
        width = max(_width(indent or 0), *(len(text) for text in separators or ("", "")))
        self.charge((6 if ensure_ascii else 2) * _size(x, self._room, _width(width)))


def _width(asked: Any) -> int:
    """The number of characters of a width or of a text that is put in for one."""
    width = len(asked) if isinstance(asked, str) else int(asked)
    if width > _WIDTH:
        raise Stopped("the chat template was stopped: it pads text too far")
    return width


def _size(value: Any, limit: int, indent: int = 0, depth: int = 0) -> int:
    """What ``value`` costs: about the characters of its text, parts that it holds twice counted twice.

    ``indent`` characters are added for each part and level. Raises Stopped above ``limit``.
    """
    if isinstance(value, str):
        return _ITEM + len(value)
    if isinstance(value, int):
        return _ITEM + value.bit_length() // 3
    total = _ITEM
    if isinstance(value, _CONTAINERS):
        parts: Iterable[Any] = chain(value, value.values()) if isinstance(value, dict) else value
        for part in parts:
            total += depth * indent + _size(part, limit - total, indent, depth + 1)
            if total > limit:
                raise Stopped("the chat template was stopped: it makes a value that is too large")
    return total
