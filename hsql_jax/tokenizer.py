"""A tiny lossless tokenizer for models of about a million parameters.

One token for each frequent word wherever it stands, so that a small model can copy names and values
by identity; one token for each constant fragment of the protocol and of SQL, spaces included, so
that trajectories are short. Anything else falls to characters, then bytes: every text round-trips.
It is an ordinary `tokenizer.json`, loaded like a real model's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hsql_jax.chat import CONTROL, MARKUP, Tools

# Closed-class words that may share a token with the spaces around them. Names and values of
# databases do not belong here: they must keep one token of their own.
_GLUE = """
    SELECT DISTINCT FROM WHERE AND OR NOT NULL IS IN LIKE BETWEEN EXISTS JOIN LEFT INNER ON AS GROUP
    ORDER BY HAVING LIMIT ASC DESC UNION ALL CASE WHEN THEN ELSE END COUNT SUM AVG MIN MAX CAST WITH
    CREATE TABLE VIEW PRIMARY KEY FOREIGN REFERENCES UNIQUE INTEGER TEXT REAL NUMERIC VARCHAR Error
    a an and are as at be by did do does each for Find from Give had has have how How in is it its
    List many more much of on only or over per Show than that the The their there to was were what
    What whose which Which with
    no such column table view row rows shown
"""

# Foreign keys are not among them: a model that copies a table's name can then write its key.
_IDENTIFIER = re.compile(r"[^\W_]+(?:_[^\W_]+)+(?!\w)(?<!_id)")


def frequent_fragments(
    texts: Iterable[str], known: Sequence[str], min_count: int, limit: int
) -> list[str]:
    """Return the `limit` most frequent runs of punctuation, spaces and glue words.

    A run reaches from one content word, or one of the `known` fragments, to the next, and is seen
    at least `min_count` times. Each glue word with its spaces counts as well, for runs too rare. A
    glue word beside a single quote is a value, not glue.
    """
    word = rf"(?<![\w'])(?:{_any_of(_GLUE.split())})(?![\w'])"
    fixed, run, alone = (
        re.compile(pattern)
        for pattern in (_any_of([*known, *MARKUP]), rf"(?:{word}|\W)+", rf" ?{word} ?")
    )
    spans = (span for text in texts for span in fixed.split(text))
    runs = Counter(match for span in spans for match in run.findall(span) if len(match) > 1)
    counts = runs.copy()
    for text, count in runs.items():
        for match in alone.findall(text):
            counts[match] += count if match != text else 0
    return [text for text, count in counts.most_common(limit) if count >= min_count]


def _any_of(strings: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(strings, key=len, reverse=True)))


def tool_call_fragments(tools: Tools) -> list[str]:
    """Return the constant strings around the first argument of each tool's call."""
    fragments = ["</tool_call>\n<tool_call>\n"]
    for tool in tools:
        function = tool["function"]
        head = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {{'
        properties = function["parameters"].get("properties", {})
        if not properties:
            fragments.append(head + "}}\n</tool_call>")
            continue
        name, schema = next(iter(properties.items()))
        opening, closing = ('["', '"]') if schema["type"] == "array" else ('"', '"')
        fragments += [f'{head}"{name}": {opening}', closing + "}}\n</tool_call>"]
    return fragments


def train_tokenizer(
    texts: Iterable[str],
    fragments: Sequence[str],
    folder: str | Path,
    max_vocab: int,
    min_count: int,
) -> Path:
    """Write `folder/tokenizer.json` of at most `max_vocab` tokens; return `folder`.

    Fragments match first, longest first; one with a control token in it becomes a control token
    itself, so it is found in the chat format and never in a message's text. Then come identifiers
    with underscores (but `city_id` is `city` and `_id`) and words seen at least `min_count` times.
    Raises ValueError where the fragments alone exceed `max_vocab`.
    """
    corpus = list(texts)
    control = [*CONTROL, *(f for f in fragments if any(token in f for token in CONTROL))]
    names = Counter(name for text in corpus for name in _IDENTIFIER.findall(text))
    wholes = [*MARKUP, *fragments, *(n for n, count in names.items() if count >= min_count)]
    splitter = _splitter([text for text in wholes if text not in control])
    bytes_and_ascii = [f"<0x{i:02X}>" for i in range(256)] + [*"\n\t", *map(chr, range(32, 127))]
    vocab = dict.fromkeys([*control, *MARKUP, *fragments, *bytes_and_ascii])
    if len(vocab) > max_vocab:
        raise ValueError(f"max_vocab={max_vocab}: the fixed tokens alone are {len(vocab)}")
    frequent = _frequent_pieces(corpus, splitter, min_count)
    vocab |= dict.fromkeys([p for p in frequent if p not in vocab][: max_vocab - len(vocab)])
    return _write(list(vocab), control, splitter, Path(folder))


def _frequent_pieces(
    corpus: Sequence[str], splitter: pre_tokenizers.PreTokenizer, min_count: int
) -> list[str]:
    """Return the pieces and characters seen at least `min_count` times, most frequent first."""
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    for piece, count in list(counts.items()):
        if len(piece) > 1:
            counts.update(dict.fromkeys(piece, count))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [piece for piece, count in ranked if count >= min_count]


def _splitter(wholes: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    """Split into whole strings, words, digits in pairs and runs of other characters, in this order.

    An underscore goes with the word after it.

    A whole string that begins or ends inside a word does not match there.
    """
    ordered = sorted(set(wholes))
    branches = [_alternation([text for text in ordered if not _is_wordlike(text[0])])]
    if starting := [text for text in ordered if _is_wordlike(text[0])]:
        branches.append(r"(?<!\w)" + _alternation(starting))
    branches += [r"_?[\p{L}\p{M}]+", r"\p{N}{1,2}", r"[^\s\p{L}\p{M}\p{N}]+", r"\s+"]
    return pre_tokenizers.Split(Regex("|".join(branches)), "isolated")


def _alternation(ordered: Sequence[str], last: str = "") -> str:
    """Return a regular expression for any of the sorted strings, the longest that fits first.

    Shared prefixes are factored out, so that matching costs the length read, not the number of
    strings. `last` is the character before them: an end inside a word is no end.
    """
    branches = []
    for _, group in groupby(ordered, key=lambda text: text[:1]):
        texts = list(group)
        if not texts[0]:
            branches.append(r"(?=_id(?!\w)|(?!\w))" if _is_wordlike(last) else "")
            continue
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
        prefix = "".join(char for char, _ in shared)
        rest = _alternation([text[len(prefix) :] for text in texts], prefix[-1])
        branches.append(re.escape(prefix) + rest)
    return f"(?:{'|'.join(reversed(branches))})"


def _is_wordlike(char: str) -> bool:
    return char.isalnum() or char == "_"


def _write(
    vocab: Sequence[str],
    control: Sequence[str],
    splitter: pre_tokenizers.PreTokenizer,
    folder: Path,
) -> Path:
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "tokenizer.json.partial"
    tokenizer.save(str(partial))
    partial.replace(folder / "tokenizer.json")
    return folder
