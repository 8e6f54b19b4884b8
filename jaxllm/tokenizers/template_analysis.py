"""Finds out from the syntax tree of a chat template what it reads of a conversation.

Most templates expect the content of a message as a text, those of multimodal models loop over its
parts, and some accept both. Some test whether the content is none, and many have no place for
tools. The findings decide in which form `messages.py` passes a conversation to a template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jaxllm.tokenizers.chat_templates import MARKS, parse_chat_template

_DEFAULT_FILTERS = ("default", "d")
_LIST_FILTERS = frozenset(
    ("selectattr", "rejectattr", "map", "groupby", "list", "reverse", "sort", "first", "last")
)
"""Filters over the items of a list."""


@dataclasses.dataclass(frozen=True)
class TemplateReads:
    """What a chat template reads of a conversation.

    Attributes:
        parts: it loops over the parts of a content, or looks up a key of one of them.
        text: it takes a content that is a text; true for all templates that do not read parts.
        null_content: it tests whether a content is none.
        tools: it reads the variable `tools`.
        calls: it reads `tool_calls`, or writes whole messages as JSON.
        marks: it marks what the assistant says with ``{% generation %}``.
    """

    parts: bool
    text: bool
    null_content: bool
    tools: bool
    calls: bool
    marks: bool


@lru_cache(maxsize=64)
def template_reads(template: str) -> TemplateReads:
    """Analyses a chat template.

    Raises:
        TemplateError: its syntax is wrong, or it is too long.

    >>> template_reads("{% for part in messages[0].content %}{{ part.text }}{% endfor %}").text
    False
    >>> reads = template_reads("{{ messages[0].content }}")
    >>> reads.parts, reads.text, reads.tools
    (False, True, False)
    """
    from jinja2 import nodes

    tree = parse_chat_template(template)
    search = _ContentSearch()
    known = -1
    while known < len(search.aliases):  # until no further variable is found that holds a content
        known = len(search.aliases)
        search.visit(tree, frozenset(search.aliases))
    return TemplateReads(
        parts="parts" in search.uses,
        text="parts" not in search.uses or "text" in search.uses,
        null_content="none" in search.uses,
        tools="tools" in _loaded(tree),
        calls="tool_calls" in template or _writes_messages(tree),
        marks=any(each.data == MARKS[0] for each in tree.find_all(nodes.TemplateData)),
    )


def _writes_messages(tree: Any) -> bool:
    """True if a template makes JSON of whole messages."""
    from jinja2 import nodes

    loops = (loop for loop in tree.find_all(nodes.For) if "messages" in _loaded(loop.iter))
    names = {"messages", *(name for loop in loops for name in _stored(loop.target))}
    filters = (each for each in tree.find_all(nodes.Filter) if each.name == "tojson")
    return any(isinstance(each.node, nodes.Name) and each.node.name in names for each in filters)


def _loaded(node: Any) -> set[str]:
    """The names that an expression or a template reads."""
    from jinja2 import nodes

    own = [node] if isinstance(node, nodes.Name) else []
    return {each.name for each in (*own, *node.find_all(nodes.Name)) if each.ctx == "load"}


class _ContentSearch:
    """Notes how the nodes of a syntax tree use the contents of messages.

    Attributes:
        uses: some of "parts" (the template loops over a content), "text" (it writes or compares
            one, or tests whether it is a string) and "none" (it tests whether one is none).
        aliases: variables and parameters of macros that may hold a content; an attribute of a
            namespace has a dot before its name.
    """

    def __init__(self) -> None:
        self._macros: dict[str, list[str]] = {}
        self.uses: set[str] = set()
        self.aliases: set[str] = set()

    def visit(self, node: Any, names: frozenset[str]) -> None:
        """Visits a node and its children; `names` are the aliases that no loop hides here."""
        from jinja2 import nodes

        held = [child for child in node.iter_child_nodes() if self._holds(child, names)]
        match node:
            case nodes.For():
                sliced = isinstance(node.iter, nodes.Getitem) and node.iter.node
                if node.iter in held or (sliced and self._holds(sliced, names)):
                    self.uses.add("parts")
                self.visit(node.iter, names)
                inner = names.difference(_stored(node.target))
                for child in (*([node.test] if node.test else ()), *node.body, *node.else_):
                    self.visit(child, inner)
                return
            case nodes.Macro():
                self._macros[node.name] = [each.name for each in node.args]
                pairs = zip(node.args[::-1], node.defaults[::-1], strict=False)
                self.aliases.update(key.name for key, value in pairs if value in held)
            case nodes.With():
                pairs = zip(node.targets, node.values, strict=True)
                self.aliases.update(*(_stored(key) for key, value in pairs if value in held))
            case nodes.Assign() if held:
                self.aliases.update(_stored(node.target))
            case nodes.Call(node=nodes.Name(name=name)) if name in self._macros:
                pairs = [*zip(self._macros[name], node.args, strict=False)]
                pairs += [(each.key, each.value) for each in node.kwargs]
                self.aliases.update(key for key, value in pairs if self._holds(value, names))
            case nodes.Compare():
                compared = [node.expr, *(each.expr for each in node.ops)]
                if any(self._holds(each, names) for each in compared):
                    is_null = any(isinstance(x, nodes.Const) and x.value is None for x in compared)
                    self.uses.add("none" if is_null else "text")
            case nodes.Test(name="none" | "string" as name) if held:
                self.uses.add("none" if name == "none" else "text")
            case nodes.Filter(name=name) if held:
                if name not in (*_DEFAULT_FILTERS, "length", "count"):
                    self.uses.add("parts" if name in _LIST_FILTERS else "text")
            case nodes.Getattr() | nodes.Getitem() if self._is_part(node.node, names):
                self.uses.add("parts")
            case (
                nodes.If() | nodes.CondExpr() | nodes.Not() | nodes.And() | nodes.Or()
                | nodes.Test() | nodes.Operand() | nodes.Keyword() | nodes.Getitem()
            ):  # fmt: skip
                pass  # these only pass a value on, or test whether there is one
            case _ if held:
                self.uses.add("text")
            case _:
                pass
        for child in node.iter_child_nodes():
            self.visit(child, names)

    def _is_part(self, node: Any, names: frozenset[str]) -> bool:
        """True for ``content[0]`` and the like."""
        from jinja2 import nodes

        return isinstance(node, nodes.Getitem) and self._holds(node.node, names)

    def _holds(self, node: Any, names: frozenset[str]) -> bool:
        """True if the value of an expression may be the content of a message."""
        return any(_is_content(each, names) for each in _values(node))


def _is_content(node: Any, names: frozenset[str]) -> bool:
    from jinja2 import nodes

    match node:
        case nodes.Name(ctx="load"):
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content" or f".{node.attr}" in names
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return key == "content"
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
            return key == "content"
        case _:
            return False


def _values(node: Any) -> Iterator[Any]:
    """The expressions of which an expression has the value of one."""
    from jinja2 import nodes

    match node:
        case nodes.CondExpr():
            yield from _values(node.expr1)
            yield from _values(node.expr2)
        case nodes.And() | nodes.Or():
            yield from _values(node.left)
            yield from _values(node.right)
        case nodes.Filter(name=name) if name in _DEFAULT_FILTERS:
            yield from _values(node.node)
        case _:
            yield node


def _stored(target: Any) -> list[str]:
    """The names that an assignment or a loop sets."""
    from jinja2 import nodes

    match target:
        case nodes.Name():
            return [target.name]
        case nodes.NSRef():
            return [f".{target.attr}"]
        case nodes.Tuple():
            return [name for each in target.items for name in _stored(each)]
        case _:
            return []
