"""Conversations to examples: what is shown, and what the loss is on.

An organisation is a pure function of a renderer and a conversation. One that holds nothing to learn
gives `NOTHING`, so that it is counted with the other examples without policy tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import grain
import numpy as np

from hsql_env.harness.parse import parse_turn
from hsql_env.records import Message
from hsql_jax.chat import ChatRenderer, Tools
from hsql_jax.data.packing import Example, trim
from hsql_jax.data.records import Conversation
from hsql_jax.errors import UserError

Organisation = Literal["full", "turns", "static"]
Organise = Callable[[ChatRenderer, Conversation], list[Example]]

NOTHING = Example((), ())
SCHEMA_CALL = '{"name": "sql_schema"'


def full(renderer: ChatRenderer, conversation: Conversation) -> list[Example]:
    """The whole conversation, loss on every assistant token, equation (6)."""
    return [_rendered(renderer, conversation.messages, conversation.tools)]


def turns(renderer: ChatRenderer, conversation: Conversation) -> list[Example]:
    """One example an assistant turn: all that came before it, loss on that turn only.

    Ids are append-only, so the prefixes share one array.
    """
    (whole,) = full(renderer, conversation)
    own = np.asarray(whole.mask, np.uint8)
    edges = np.flatnonzero(np.diff(own, prepend=0, append=0)).tolist()
    examples = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask = np.zeros(end, np.uint8)
        mask[start:] = 1
        examples.append(Example(whole.ids[:end], mask))
    return examples or [NOTHING]


def static(renderer: ChatRenderer, conversation: Conversation) -> list[Example]:
    """The question and the schema that was read, loss on the final SQL, equation (3).

    Question and SQL are those of the metadata, else the first user message and the last query
    submitted. A conversation that read no schema or submitted nothing gives `NOTHING`.
    """
    messages, metadata = conversation.messages, conversation.metadata
    asked = (message.content for message in messages if message.role == "user")
    question = metadata.get("question") or next(asked, "")
    sql = metadata.get("sql") or submitted(messages)
    schemas = list(dict.fromkeys(schemas_shown(messages)))
    if not (question and sql and schemas):
        return [NOTHING]
    return [_rendered(renderer, static_pair(schemas, question, sql), [])]


ORGANISATIONS: Mapping[Organisation, Organise] = {"full": full, "turns": turns, "static": static}


def make_examples(
    conversations: Iterable[Conversation],
    renderer: ChatRenderer,
    organise: Organise,
    workers: int = 0,
) -> Iterator[Example]:
    """Yield the examples of all conversations in order, tokenised by `workers` threads.

    Raises `UserError`, naming the record and the message, where one cannot be rendered.
    """

    def tokenise(conversation: Conversation) -> list[Example]:
        try:
            return organise(renderer, conversation)
        except ValueError as error:
            raise UserError(f"{conversation.source}: {error}") from None

    source = grain.MapDataset.source(list(conversations)).map(tokenise)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=4 * workers)
    for examples in source.to_iter_dataset(options):
        yield from examples


def schemas_shown(messages: Sequence[Message]) -> list[str]:
    """What the `sql_schema` calls of a conversation showed, in order."""
    return [
        observation.content
        for call, observation in pairwise(messages)
        if call.role == "assistant" and SCHEMA_CALL in call.content
    ]


def submitted(messages: Sequence[Message]) -> str:
    """The last query of a `sql_submit` call, "" without one."""
    for message in reversed(messages):
        for call in parse_turn(message.content).calls if message.role == "assistant" else ():
            if call.name == "sql_submit" and not call.error:
                return str(call.arguments.get("query", ""))
    return ""


def static_pair(tables: Sequence[str], question: str, sql: str) -> list[Message]:
    """A conversation of one turn: tables and question, then the SQL."""
    prompt = "\n".join([*tables, question])
    return [Message(role="user", content=prompt), Message(role="assistant", content=sql)]


def _rendered(renderer: ChatRenderer, messages: Sequence[Message], tools: Tools) -> Example:
    """Ids and mask as arrays, an eighth of the memory that lists take."""
    ids, mask = renderer.render(messages, tools)
    return trim(Example(np.asarray(ids, np.int32), np.asarray(mask, np.uint8)))
