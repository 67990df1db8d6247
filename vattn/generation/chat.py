"""`Chat`: a conversation as a prompt, by the chat template of the tokenizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vattn.errors import ConfigError, RequestError


class Chat:
    """A conversation as a prompt: what the tokenizer's chat template makes of it.

    Args:
        messages: mappings with `role` and `content`, as transformers and OpenAI have them; the last one is answered.
        **options: for `tokenizer.apply_chat_template`, such as `tools`, `chat_template`, `continue_final_message=True`
            or what the template itself knows. `add_generation_prompt` is true unless the last message is continued.

    Raises:
        ConfigError: something else than a sequence of mappings.

    Example:
        >>> import vattn
        >>> vattn.Chat([{"role": "user", "content": "Hello"}])
        Chat(1 message)
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> None:
        if not is_conversation(messages):
            raise ConfigError(
                f"Chat({messages!r:.60})",
                "a list of messages, each with a role",
                '[{"role": "user", "content": "..."}]',
            )
        self.messages, self.options = [dict(message) for message in messages], options

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} message{'s' if len(self.messages) > 1 else ''})"

    def has_template(self, tokenizer: Any) -> bool:
        """Return whether a tokenizer has a chat template, or the options name one."""
        if not callable(getattr(tokenizer, "apply_chat_template", None)):
            return False
        # A method of the tokenizer's own may need none.
        return not _is_transformers(tokenizer) or tokenizer.chat_template is not None or "chat_template" in self.options

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            RequestError: a tokenizer without a chat template, a conversation that it refuses, or one with more than
                texts.
        """
        if not self.has_template(tokenizer):
            raise RequestError(
                "a chat for a generator whose tokenizer has no chat template",
                "the tokenizer of a chat model",
                "give the generator such a tokenizer=, or pass vattn.Chat(messages, chat_template=...)",
            )
        for message in self.messages:
            if "content" not in message and "tool_calls" not in message:
                raise RequestError(
                    f"a message of role {message['role']!r} without content", "role and content", "add the content"
                )
            content = message.get("content")
            parts = content if isinstance(content, (list, tuple)) else ()
            kinds = [part.get("type") for part in parts if isinstance(part, Mapping) and part.get("type") != "text"]
            if kinds:
                raise RequestError(
                    f"a message with content of type {kinds[0]!r}",
                    "texts",
                    "leave it out, or pass what the processor of a model that takes images returned instead of a chat",
                )
        if unread := self._unread(tokenizer):
            raise RequestError(
                f"a chat with the option {unread[0]!r}, which the chat template does not read",
                "options of apply_chat_template other than those for its result, and names in the template",
                "correct the name, or leave it out",
            )
        options = {"add_generation_prompt": not self.options.get("continue_final_message", False)} | self.options
        try:
            return list(tokenizer.apply_chat_template(self.messages, **options | _AS_IDS)["input_ids"])
        except Exception as error:
            raise RequestError(
                f"a chat that the tokenizer refuses: {error}",
                "what its chat template takes",
                "check the messages and tokenizer.chat_template",
            ) from error

    def _unread(self, tokenizer: Any) -> list[str]:
        """Return the options that would be ignored."""
        given = [name for name, value in self.options.items() if value != _AS_IDS.get(name, value)]
        if not _is_transformers(tokenizer):
            return given  # a method of the tokenizer's own takes what it likes
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        named = self.options.get("chat_template")
        templates = tokenizer.chat_template if named is None else named
        text = " ".join(templates.values()) if isinstance(templates, dict) else str(templates)
        others = [name for name in self.options if name not in taken]
        return given + [name for name in others if not re.search(rf"\b{re.escape(name)}\b", text)]


def _is_transformers(tokenizer: Any) -> bool:
    """Return whether a tokenizer makes prompts by a template, as transformers' own do."""
    return bool(type(tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base")


_AS_IDS = {"tokenize": True, "return_dict": True, "return_tensors": None, "padding": False}


def is_conversation(messages: Any) -> bool:
    """Return whether something is a sequence of messages."""
    whole = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) and len(messages) > 0
    return whole and all(isinstance(message, Mapping) and "role" in message for message in messages)
