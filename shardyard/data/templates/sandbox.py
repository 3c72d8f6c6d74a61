"""A chat template in a closed sandbox: what it renders is transformers' text, what it may use is bounded.

Chat templates come with models and from users, so their text is not trusted. Over jinja2's immutable sandbox
(no attribute with an underscore, nothing of the data can be changed) this one

- knows only the filters and methods listed here, none of which can make much from little unseen;
- meters a rendering (meter.py): each loop turn, call, filter and operation costs a step, each value its
  size, and what may be slow at a small cost is timed.

Loops, literals, slices, comparisons and ``~`` are metered by calls that are put into the parsed template;
operators, calls, filters and tests where jinja2 lets a sandbox meet them.
"""

from __future__ import annotations

from collections.abc import Callable
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
from shardyard.data.templates.meter import Meter, Stopped, size_of, width_of
from shardyard.data.templates.metering import Metering
from shardyard.errors import first_line

TEMPLATE_CHARS = 1 << 17
"""Largest template; the largest of a known family has 20,000 characters."""

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
    return first_line(error)[:120]


class _Environment(Meter, ImmutableSandboxedEnvironment):
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

    # Where jinja2 lets a sandbox in

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = Metering().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        room = self.room
        if operator == "%" and isinstance(left, str):
            self.check_printf(left, right)
        elif operator == "+" and not isinstance(left, list):
            self.charge(size_of(left, room) + size_of(right, room))
        elif operator == "*":
            self.check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check_number(left.bit_length() * abs(right))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # put in by Metering
        __self.step()
        if isinstance(owner, str) and isinstance(__obj, BuiltinMethodType | MethodType):
            args = __self.check_method(owner, __obj.__name__, args, kwargs)
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
            self.check_format(pattern, chain(args, kwargs.values()))
            return self.made(inner(*args, **kwargs))

        return checked

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes first
        check = getattr(self, f"_check_filter_{name}", None)

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.step()
            head, (value, *rest) = args[:passed], args[passed:] or (None,)
            if name not in _SHALLOW:
                if isinstance(value, GeneratorType):
                    value = self.listed(value)
                self.charge(size_of(value, self.room))
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
        self.charge(size_of(d, self.room) * len(value))

    def _check_filter_replace(self, value: Any, old: Any, new: Any, count: Any = None) -> None:
        self.check_replace(str(value), old, new)

    def _check_filter_format(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self.check_printf(str(value), [*args, *kwargs.values()])

    def _check_filter_escape(self, value: Any) -> None:
        self.charge(5 * size_of(value, self.room))

    _check_filter_e = _check_filter_escape

    def _check_filter_indent(
        self, value: Any, width: Any = 4, first: Any = False, blank: Any = False
    ) -> None:
        self.charge(len(value.splitlines()) * width_of(width))

    def _check_filter_trim(self, value: Any, chars: Any = None) -> None:
        self.check_pairs(str(value), chars)

    def _check_filter_round(self, value: Any, precision: Any = 0, method: Any = "common") -> None:
        width_of(abs(precision))

    def _check_filter_sum(self, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
        if not isinstance(start, int | float):
            raise Stopped("the chat template was stopped: it sums what are not numbers")

    def _check_filter_tojson(
        self, x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, **_: Any
    ) -> None:
        width = max(width_of(indent or 0), *(len(text) for text in separators or ("", "")))
        self.charge((6 if ensure_ascii else 2) * size_of(x, self.room, width_of(width)))
