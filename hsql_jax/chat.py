"""Messages to token ids and policy mask, in the format of the official Qwen3 chat template.

Rendering is incremental and append-only: ids once produced, or sampled, are never rendered again.
A conversation is `begin`, the policy's own ids up to its `<|im_end|>`, `observe`, the policy's ids
again, and so on; `render` joins the same pieces for supervised training. The result equals the
official template's ids where the template does not render history anew. Where it does:

- It shows an empty think block in the last assistant turn only. Here the block stands where a
  generation prompt had it: in every turn when `thinking` is False, in none otherwise.
- It lays out a turn's reasoning in its own way. Here a turn stays as the policy wrote it.
- It encodes prompt and turn at once. Here no token spans both, such as one of their line breaks.

Control tokens spelt out in any content, and markup outside the policy's turns, are ordinary text,
though the template's own encoding would parse them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsql_env.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START, STOP = "<|im_start|>", "<|im_end|>"
CONTROL = ("<|endoftext|>", START, STOP)
MARKUP = tuple(
    f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")
)

_GENERATION = f"{START}assistant\n"
_EMPTY_THINK = "<think>\n\n</think>\n\n"
_TOOLS_OPEN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_CLOSE = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

Tools = Sequence[Mapping[str, Any]]


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder with `tokenizer.json`; FileNotFoundError where it is not."""
    from transformers import PreTrainedTokenizerFast

    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no tokenizer.json there; name a folder that holds one")
    return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)


class Content(str):
    """Text of a message: tokens of control or markup must not arise in it."""


class ChatRenderer:
    """Renders one chat format; holds no conversation, so one renderer serves many episodes.

    `thinking`: True, the policy reasons in a think block in every turn; False, each generation
    prompt holds an empty block; None, no think blocks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, thinking: bool | None = None) -> None:
        self.thinking = thinking
        self._backend = tokenizer.backend_tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        if missing := [token for token in CONTROL if token not in added]:
            raise ValueError(f"the tokenizer has no control token {missing[0]}; use a Qwen3 one")
        self._not_in_content = added | set(MARKUP)
        self._not_in_policy = added - set(MARKUP)
        self._generation = _GENERATION + (_EMPTY_THINK if thinking is False else "")
        self.stop_id: int = self._backend.token_to_id(STOP)

    def begin(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of the optional system turn, user turns and generation prompt.

        Raises ValueError, naming the message, for any other role or order; and where the policy
        reasons, for user turns that the template takes for tool responses: with no query in sight
        it drops all reasoning.
        """
        system = messages[0].content if messages and messages[0].role == "system" else None
        skip = 0 if system is None else 1
        _check_roles(messages[skip:], {"user"}, "before the policy's first turn", skip)
        if self.thinking and all(map(_reads_as_response, messages[skip:])):
            raise _refusal(skip, messages[skip], "reads as a tool response, with thinking=True")
        parts = [*system_turn(system, tools), *_turns(messages[skip:]), self._generation]
        return self._encode(parts, self._not_in_content)

    def observe(self, messages: Sequence[Message], first: int = 0) -> list[int]:
        """Return all ids that follow the policy's `<|im_end|>`, up to its next token.

        Consecutive tool messages share a user turn. Raises ValueError, naming the message counted
        from `first`, for a role other than tool, or user where the policy does not reason: a new
        user turn makes the template drop earlier reasoning, which is not append-only.
        """
        roles = {"tool"} if self.thinking else {"tool", "user"}
        _check_roles(messages, roles, f"after a turn with thinking={self.thinking}", first)
        return self._encode(["\n", *_turns(messages), self._generation], self._not_in_content)

    def policy_ids(self, text: str) -> list[int]:
        """Return the ids of an assistant text and its `<|im_end|>`; markup parses, control not."""
        return self._encode([Content(text), STOP], self._not_in_policy)

    def render(self, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[int]]:
        """Return ids and mask of a conversation; mask 1 exactly on what the policy produces.

        Raises ValueError, naming the message, where the conversation cannot be append-only.
        """
        opening = list(takewhile(lambda message: message.role != "assistant", messages))
        ids = self.begin(opening, tools)
        mask = [0] * len(ids)
        done = len(opening)
        for is_policy, group in groupby(messages[done:], key=lambda m: m.role == "assistant"):
            turn = list(group)
            new = self._policy_turn(turn, done) if is_policy else self.observe(turn, done)
            mask += [int(is_policy)] * len(new)
            ids += new
            done += len(turn)
        return ids, mask

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a policy's ids, without the stop token that ends them."""
        own = ids[:-1] if ids and ids[-1] == self.stop_id else ids
        return self._backend.decode(list(own), skip_special_tokens=False)

    def _policy_turn(self, turn: Sequence[Message], first: int) -> list[int]:
        if len(turn) > 1:
            raise _refusal(first + 1, turn[1], "follows an assistant message")
        if "</think>" in turn[0].content and not self.thinking:
            raise _refusal(first, turn[0], f"holds reasoning, with thinking={self.thinking}")
        return self.policy_ids(turn[0].content)

    def _encode(self, parts: Sequence[str], forbidden: Collection[str]) -> list[int]:
        """Encode the joined parts as the template does; no `forbidden` token arises in Content."""
        segments = [""]
        for part in parts:
            first, *rest = _cut(part, forbidden) if isinstance(part, Content) else [part]
            segments[-1] += first
            segments += rest
        encoded = self._backend.encode_batch_fast(segments, add_special_tokens=False)
        return [token for encoding in encoded for token in encoding.ids]


def system_turn(system: str | None, tools: Tools) -> list[str]:
    """Return the parts of the system turn, the tools section included; none when both are empty."""
    if not tools:
        return [] if system is None else [f"{START}system\n", Content(system), f"{STOP}\n"]
    head = [] if system is None else [Content(system), "\n\n"]
    listed: list[str] = []
    for tool in tools:
        listed += ["\n", Content(json.dumps(tool, ensure_ascii=False))]
    return [f"{START}system\n", *head, _TOOLS_OPEN, *listed, _TOOLS_CLOSE, f"{STOP}\n"]


def template_fragments(system: str, tools: Tools) -> list[str]:
    """Return the format's constant strings, for a tokenizer that gives each of them one token."""
    opening, closing = f"{START}user", f"{STOP}\n{_GENERATION}"
    response, end = "\n<tool_response>\n", "\n</tool_response>"
    return [
        "".join(system_turn(system, tools)) + f"{opening}\n",
        f"{opening}\n",
        f"\n{opening}\n",
        closing,
        f"\n{opening}{response}",
        end + response,
        end + closing,
    ]


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the parts of user turns; consecutive tool messages share one."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            yield f"{START}user"
            for message in group:
                yield from ("\n<tool_response>\n", Content(message.content), "\n</tool_response>")
            yield f"{STOP}\n"
        else:
            for message in group:
                yield from (f"{START}{role}\n", Content(message.content), f"{STOP}\n")


def _reads_as_response(message: Message) -> bool:
    """Whether the template takes a user message for a tool's and not for a query."""
    text = message.content
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


def _cut(text: str, forbidden: Collection[str]) -> list[str]:
    """Cut `text` behind the first character of each forbidden token, so that none is parsed."""
    cuts = {0, len(text)}
    for token in forbidden:
        at = text.find(token)
        while at >= 0:
            cuts.add(at + 1)
            at = text.find(token, at + 1)
    edges = sorted(cuts)
    return [text[a:b] for a, b in pairwise(edges)] or [""]


def _check_roles(messages: Sequence[Message], roles: set[str], where: str, first: int) -> None:
    for index, message in enumerate(messages, first):
        if message.role not in roles:
            raise _refusal(index, message, f"{where} only {' or '.join(sorted(roles))} may come")
    if not messages:
        raise ValueError(
            f"messages[{first}]: a {' or '.join(sorted(roles))} message must come here"
        )


def _refusal(index: int, message: Message, reason: str) -> ValueError:
    return ValueError(f"messages[{index}] ({message.role}): {reason}")
