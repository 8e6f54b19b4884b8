"""Base class of tokenizers: chat templates, added tokens, saving."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

from jaxllm.common.arguments import checked, checked_list, checked_path, checks_flags
from jaxllm.common.errors import (
    InputError,
    TemplateError,
    TokenizerError,
    UnsupportedError,
    listed,
    naming_file,
    quoted,
)
from jaxllm.common.files import write_whole
from jaxllm.tokenizers.batch import (
    ListEncoding,
    Padding,
    PaddingSide,
    ReturnTensors,
    Truncation,
    checked_side,
    truncate,
)
from jaxllm.tokenizers.batch_encoder import BatchEncoder
from jaxllm.tokenizers.chat import continuation
from jaxllm.tokenizers.chat import templates as chat
from jaxllm.tokenizers.chat.messages import normalized_messages
from jaxllm.tokenizers.files import (
    FILE_NAMES,
    NAMED_TOKENS,
    additional_templates,
    drop_template_files,
)
from jaxllm.tokenizers.settings import (
    MAX_ADDED_TOKEN_BYTES,
    AddedToken,
    TokenizerSettings,
    template_option,
)
from jaxllm.tokenizers.text_encoder import MAX_TEXT_BYTES, check_text

# Options of transformers' apply_chat_template that would become template variables here.
_UNSUPPORTED_CHAT_OPTIONS = frozenset({"return_assistant_tokens_mask", "tokenizer_kwargs"})


class Tokenizer(BatchEncoder):
    """Converts text to token ids and back, with Hugging Face's names and ids.

    Attributes:
        padding_side, truncation_side: defaults of ``__call__``: "left" or "right".
    """

    truncation_side: PaddingSide

    def __init__(
        self, settings: TokenizerSettings, files: Mapping[str, bytes], padding_side: PaddingSide
    ) -> None:
        super().__init__(settings, files)
        for name, default in (("padding_side", padding_side), ("truncation_side", "right")):
            side = settings.options.get(name, default)
            setattr(
                self, name, checked_side(side, TokenizerError, f"tokenizer_config.json: {name}")
            )

    @property
    def chat_template(self) -> str | None:
        """Default chat template (Jinja source), or None."""
        return self.settings.chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, template: str | Mapping[str, str] | None) -> None:
        kinds = (str, Mapping, type(None))
        checked(template, kinds, "chat_template", "a template, a dict of them by name or None")
        templates = {"default": template} if isinstance(template, str) else dict(template or {})
        for name, each in templates.items():
            check_text(checked(name, (str,), "chat_template", "names"), MAX_TEXT_BYTES)
            check_text(each, MAX_TEXT_BYTES)
        self.settings = replace(self.settings, chat_templates=templates)
        drop_template_files(self._files)
        self._set_option("chat_template", template_option(templates))

    @contextmanager
    def as_target_tokenizer(self) -> Generator[None]:
        """Context for the texts that a model should write, which these tokenizers encode like all.

        Old scripts use it; ``text_target=`` does the same.
        """
        yield

    @checks_flags
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_tensors: ReturnTensors = None,
        return_dict: bool = False,
        padding: Padding = False,
        truncation: Truncation = False,
        max_length: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
        **kwargs: Any,
    ) -> Any:
        """Applies the chat template to a conversation, or to each of several; returns ids or text.

        The ids are those of transformers, except that a special token in a message or tool is plain
        text. No special tokens are added to the template's own.

        Args:
            messages: ``{"role": ..., "content": ...}``, and other keys that the template reads; or
                a list of such conversations.
            add_generation_prompt: append the start of the assistant's turn; None: unless
                `continue_final_message` (transformers: not).
            continue_final_message: end inside the last message, so that the model goes on with it.
            tokenize: return ids; if False, the text.
            return_tensors: "np" or "jax" for int32 [B, T]; None for a list.
            return_dict: return ids and mask, as a call of the tokenizer does (transformers 5: the
                default).
            padding, truncation, max_length: as for ``__call__``.
            tools: JSON schemas of functions, for templates with tools.
            chat_template: a template, or the name of one of the tokenizer's.
            max_bytes: maximum length of the text that is tokenized, in bytes of UTF-8.
            **kwargs: further variables for the template.

        Returns:
            ``list[int]`` for one conversation, or a list of them; ``str`` with ``tokenize=False``;
            an array or an encoding with ``return_tensors`` or ``return_dict``.

        Raises:
            TemplateError: there is no template, or it is too large, too slow, or failed.
            InputError: the messages are no list of dicts of JSON values, or become too long.
            UnsupportedError: an option of transformers that is not a template variable.
        """
        unsupported = _UNSUPPORTED_CHAT_OPTIONS.intersection(kwargs)
        if unsupported:
            raise UnsupportedError(f"apply_chat_template does not take {sorted(unsupported)}")
        single = not _are_conversations(messages)
        template = self._select_template(chat_template, tools is not None)
        if continue_final_message and add_generation_prompt:
            raise InputError("add_generation_prompt: not with continue_final_message; give one")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools, **kwargs}
        chats: Any = [messages] if single else messages
        if not tokenize:
            texts = [
                self._render(template, each, variables, continue_final_message) for each in chats
            ]
            return texts[0] if single else texts
        rows = [
            self._chat_ids(template, each, variables, continue_final_message, max_bytes)
            for each in chats
        ]
        limit = self._truncation_length(truncation, max_length)
        if limit is not None:
            side = self.truncation_side
            rows = [truncate(row, None, limit, truncation, side)[0] for row in rows]
        batch = self.pad(
            rows, padding=padding, max_length=max_length, return_tensors=return_tensors
        )
        if isinstance(batch, ListEncoding) and single:
            batch = ListEncoding(batch.input_ids[0], batch.attention_mask[0])  # pyright: ignore
        return batch if return_dict else batch.input_ids

    def _template_variables(
        self, messages: Any, variables: Mapping[str, Any], continue_final: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Variables of a template: user input, and all others."""
        messages = normalized_messages(messages)
        own: dict[str, Any] = {name: token.content for name, token in self.settings.named.items()}
        if self.settings.extra:
            own["additional_special_tokens"] = [t.content for t in self.settings.extra]
        trusted = {**own, **variables}
        if continue_final:
            messages = continuation.tagged(messages)
        untrusted = {"messages": messages, "tools": trusted.pop("tools")}
        if "documents" in trusted:
            untrusted["documents"] = trusted.pop("documents")
        return untrusted, trusted

    def _render(
        self, template: str, messages: Any, variables: Mapping[str, Any], continue_final: bool
    ) -> str:
        untrusted, trusted = self._template_variables(messages, variables, continue_final)
        text = chat.render(template, {**untrusted, **trusted})
        return continuation.cut(text) if continue_final else text

    def _chat_ids(
        self,
        template: str,
        messages: Any,
        variables: Mapping[str, Any],
        continue_final: bool,
        max_bytes: int,
    ) -> list[int]:
        """Token ids of one conversation."""
        untrusted, trusted = self._template_variables(messages, variables, continue_final)
        rendered = chat.render_parts(template, untrusted, trusted, self.special_tokens)
        if continue_final:
            rendered = continuation.cut_parts(rendered)
        parts = [rendered] if isinstance(rendered, str) else rendered
        check_text("".join(p if isinstance(p, str) else p.content for p in parts), max_bytes)
        if isinstance(rendered, str):
            return self._encode_texts([rendered])[0]
        return self._encode_parts(parts)

    def _select_template(self, chat_template: str | None, has_tools: bool) -> str:
        """The template for a call; what looks like a name has to be one, unlike in transformers."""
        templates = self.settings.chat_templates
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise InputError(
                    f"chat_template: expected a str, found {type(chat_template).__name__}"
                )
            if chat_template not in templates and re.fullmatch(r"[\w.-]{1,100}", chat_template):
                raise InputError(
                    f"chat_template: {quoted(chat_template)} is no template, which would write the "
                    "messages, nor the name of one of this tokenizer's: "
                    + (listed(sorted(templates)) or "it has none")
                )
            return templates.get(chat_template, chat_template)
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" not in templates:
            raise TemplateError(
                "this tokenizer has no default chat template: pass chat_template="
                + (f", for example the name of one of {sorted(templates)}" if templates else "...")
            )
        return templates["default"]

    @checks_flags
    def add_tokens(
        self,
        new_tokens: str | AddedToken | Sequence[str | AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Adds tokens at which texts are split; returns how many of them got a new id.

        A token of the vocabulary keeps its id, and is no longer split. ``save`` writes the added
        tokens. A model needs rows for new ids: ``model.resize_token_embeddings(len(tokenizer))``.

        Args:
            new_tokens: one or more tokens; ``AddedToken`` for one with options.
            special_tokens: tokens given as strings are special, so that ``skip_special_tokens``
                leaves them out.
        """
        single = isinstance(new_tokens, str | AddedToken)
        values = [new_tokens] if single else checked_list(new_tokens, "new_tokens")
        added, size = dict(self.settings.added), len(self)
        for value in values:
            if not isinstance(value, str | AddedToken) or value in ("", AddedToken("")):
                raise InputError(f"add_tokens: {quoted(value)} is not a token")
            check_text(str(value), MAX_TEXT_BYTES)
            if len(str(value).encode()) > MAX_ADDED_TOKEN_BYTES:
                raise InputError(
                    f"add_tokens: {quoted(value)} has more than {MAX_ADDED_TOKEN_BYTES} bytes"
                )
            if isinstance(value, str) and value in self.special_tokens:
                continue
            token = (
                AddedToken(value, special=special_tokens, normalized=not special_tokens)
                if isinstance(value, str)
                else value
            )
            known = {each.content: index for index, each in added.items()}
            index = known.get(token.content, self.token_to_id(token.content))
            if index is None:
                index, size = size, size + 1
            added[index] = token
        before = len(self)
        self._rebuild(replace(self.settings, added=dict(sorted(added.items()))))
        return len(self) - before

    @checks_flags
    def add_special_tokens(
        self, tokens: Mapping[str, Any], replace_extra_special_tokens: bool = True
    ) -> int:
        """Sets named tokens such as ``pad_token``, adding those that are new; returns how many are.

        Args:
            tokens: token by name; under ``additional_special_tokens`` or ``extra_special_tokens`` a
                list of further special tokens.
            replace_extra_special_tokens: the list takes the place of `additional_special_tokens`;
                otherwise it is added to them. Tokens that leave the list stay special.
        """
        lists = ("additional_special_tokens", "extra_special_tokens")
        checked(tokens, (Mapping,), "tokens", "a dict of tokens by name")
        unknown = tokens.keys() - {*NAMED_TOKENS, *lists}
        if unknown:
            raise InputError(f"{sorted(unknown)}: special tokens are {(*NAMED_TOKENS, *lists)}")
        named = {name: value for name, value in tokens.items() if name in NAMED_TOKENS}
        extra = [v for name in lists for v in checked_list(tokens.get(name) or (), name)]
        named, extra = {k: _special(v) for k, v in named.items()}, [_special(v) for v in extra]
        count = self.add_tokens([*named.values(), *extra], special_tokens=True)
        for name, value in named.items():
            self.set_named_token(name, value.content if isinstance(value, AddedToken) else value)
        special = [self.special_tokens[str(getattr(each, "content", each))] for each in extra]
        if extra:
            kept = () if replace_extra_special_tokens else self.settings.extra
            every = tuple(dict.fromkeys((*kept, *special)))
            self.settings = replace(self.settings, extra=every)
            self._set_option("additional_special_tokens", [token.content for token in every])
        return count

    @abstractmethod
    def _rebuild(self, settings: TokenizerSettings) -> None:
        """Makes the tokenizer anew with other added tokens, which ``save`` then writes."""

    def _become(self, other: Tokenizer) -> None:
        """Takes the state of another tokenizer, except for the sides of padding and truncation."""
        sides = {"padding_side": self.padding_side, "truncation_side": self.truncation_side}
        state = vars(self)
        state.clear()
        state.update({**vars(other), **sides})

    def save_pretrained(self, save_directory: str | PathLike[str]) -> tuple[str, ...]:
        """Writes the tokenizer's files, for transformers and jaxllm; returns their paths.

        Files that were loaded from a folder are written byte for byte, except for a named token
        that was changed. Files of an earlier tokenizer in the folder are removed.

        Raises:
            TokenizerError: a file cannot be written.
        """
        folder = checked_path(save_directory, "save_directory")
        self.save(folder)
        return tuple(str(folder / name) for name in self._files)

    def digest(self) -> str:
        """Digest of the files that `save` writes, 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:16]

    def save(self, folder: str | PathLike[str]) -> None:
        """Saves the tokenizer; see :meth:`save_pretrained`."""
        folder = checked_path(folder, "folder")
        with naming_file(folder, TokenizerError, "created"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            with naming_file(folder / name, TokenizerError, "written"):
                (folder / name).parent.mkdir(exist_ok=True)
                write_whole(folder / name, content)
        # Those of an earlier tokenizer, which `load_tokenizer` would read too:
        for path in [*(folder / name for name in FILE_NAMES), *additional_templates(folder)]:
            if path.relative_to(folder).as_posix() not in self._files:
                with naming_file(path, TokenizerError, "written"):
                    path.unlink(missing_ok=True)


def _are_conversations(messages: Any) -> bool:
    """True for a list of conversations, False for the messages of one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return False
    return bool(messages) and all(
        isinstance(each, Sequence) and not isinstance(each, str | bytes) for each in messages
    )


def _special(token: Any) -> Any:
    """An added token that is special; other values as they are."""
    return replace(token, special=True) if isinstance(token, AddedToken) else token
