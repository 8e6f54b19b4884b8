"""Chats: conversations with the templates that render them, and what the templates mark."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.common.errors import InputError, TemplateError, listed, quoted
from jaxllm.tokenizers import chat_templates
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.messages import is_whole, read_messages, read_tools, template_forms
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.template_analysis import template_reads

Parts = str | list[str | AddedToken]
"""A rendered chat: a text, or the template's special tokens and the texts between them."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation in the form that a chat template expects.

    Attributes:
        template: Jinja source.
        untrusted: messages, tools and documents. Special tokens that they spell are plain text.
        trusted: all other variables.
        continues: the chat ends inside its last message.
    """

    template: str
    untrusted: Mapping[str, Any]
    trusted: Mapping[str, Any]
    continues: bool = False

    @classmethod
    def of(
        cls,
        settings: TokenizerSettings,
        template: str | None,
        messages: object,
        variables: Mapping[str, Any],
        *,
        name: str = "messages",
        continues: bool = False,
    ) -> Chat:
        """Reads a conversation, and chooses its template.

        Args:
            settings: templates and special tokens of a tokenizer.
            template: Jinja source, the name of a template of the tokenizer, or None: its default,
                or the template for tools if there are tools.
            variables: variables of the template; `tools` and `documents` are user input.
            name: name of the conversation, for errors.
            continues: the chat ends inside its last message.

        Raises:
            InputError: a message or a tool is wrong, or the template has no place for it.
            TemplateError: there is no such template, or its syntax is wrong.
        """
        variables, read = dict(variables), read_messages(messages, name)
        tools = read_tools(variables.pop("tools", None))
        source = select_template(settings.chat_templates, template, tools is not None)
        reads = template_reads(source)
        if tools is not None and not reads.tools:
            raise InputError(
                "tools: the chat template has no place for them; give a chat_template that reads "
                "`tools`, or leave them out"
            )
        untrusted: dict[str, Any] = {"tools": tools}
        if "documents" in variables:
            untrusted["documents"] = variables.pop("documents")
        own: dict[str, Any] = {key: token.content for key, token in settings.named.items()}
        if settings.extra:
            own["additional_special_tokens"] = [token.content for token in settings.extra]
        chats = [
            cls(
                source,
                {"messages": chat_templates.tagged(form) if continues else form, **untrusted},
                {**own, **variables},
                continues,
            )
            for form in template_forms(read, reads, name)
        ]
        if len(chats) == 1:
            return chats[0]
        return next((each for each in chats if each._shows(read)), chats[0])

    def _shows(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """True if the template takes this form of the messages, and writes all their texts."""
        with contextlib.suppress(TemplateError):
            return is_whole(self._render(), messages, self.untrusted["messages"])
        return False

    def _render(self, *, with_marks: bool = False) -> str:
        variables = {**self.untrusted, **self.trusted}
        return chat_templates.render(self.template, variables, with_marks=with_marks)

    def text(self) -> str:
        """The rendered chat."""
        text = self._render()
        return chat_templates.cut(text) if self.continues else text

    def parts(self, special: Mapping[str, AddedToken]) -> Parts:
        """The rendered chat, divided where it has special tokens of the template.

        Args:
            special: special tokens by text.
        """
        parts = chat_templates.render_parts(self.template, self.untrusted, self.trusted, special)
        return chat_templates.cut_parts(parts) if self.continues else parts

    def marked_spans(self) -> list[tuple[int, int]]:
        """Start and end of each text between ``{% generation %}`` and ``{% endgeneration %}``, in
        characters of `text`."""
        pieces = re.split(f"[{chat_templates.MARKS}]", self._render(with_marks=True))
        positions: list[int] = []
        for number, piece in enumerate(pieces):
            before = positions[-1] if number else 0
            positions.append(before + len(piece))
        return list(zip(positions[:-1:2], positions[1:-1:2], strict=True))


def cut_at(parts: Parts, position: int) -> Parts:
    """The first `position` characters of a rendered chat.

    >>> cut_at(["ab", AddedToken("<s>"), "cd"], 6)[-1]
    'c'
    """
    if isinstance(parts, str):
        return parts[:position]
    result: list[str | AddedToken] = []
    for part in parts:
        if position <= 0:
            break
        size = len(part if isinstance(part, str) else part.content)
        result.append(part[:position] if isinstance(part, str) else part)
        position -= size
    return result


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of equal items at the start of two sequences.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def select_template(templates: Mapping[str, str], chosen: object, has_tools: bool) -> str:
    """The template of a chat; what looks like a name has to be one, unlike in transformers.

    Raises:
        InputError: no template has the name that was given.
        TemplateError: none was given, and there is no default template.
    """
    if chosen is not None:
        if not isinstance(chosen, str):
            raise InputError(f"chat_template: expected a str, found {type(chosen).__name__}")
        if chosen not in templates and re.fullmatch(r"[\w.-]{1,100}", chosen):
            raise InputError(
                f"chat_template: {quoted(chosen)} is no template, which would write the "
                "messages, nor the name of one of this tokenizer's: "
                + (listed(sorted(templates)) or "it has none")
            )
        return templates.get(chosen, chosen)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise TemplateError(
            "this tokenizer has no default chat template: pass chat_template="
            + (f", for example the name of one of {sorted(templates)}" if templates else "...")
        )
    return templates["default"]
