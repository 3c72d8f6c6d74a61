"""Calls of a meter, put into a parsed template where jinja2 lets no sandbox in.

The environment has the methods: ``step(cost)`` runs before the body of each loop, ``measured(value)`` around
what is compared and what filters a loop, ``literal(value)`` around lists, tuples and mappings,
``made(value)`` around slices, ``joined(*parts)`` in the place of ``~``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer


class Metering(NodeTransformer):
    """See the module. ``visit`` gives the metered template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        data = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        step = _call("step", [nodes.Const(data, lineno=node.lineno)], node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = _call("measured", [node.test], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _constant(node.items) else _call("literal", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _constant(node.items) else _call("literal", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node], node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(isinstance(side, nodes.Const) for side in sides) or len(sides) > 2:
            node.expr = _call("measured", [node.expr], node)
            for operand in node.ops:
                operand.expr = _call("measured", [operand.expr], node)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("autoescape is not for chat templates", node.lineno)


def _call(name: str, args: Sequence[nodes.Node], node: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=node.lineno)


def _constant(items: list[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)
