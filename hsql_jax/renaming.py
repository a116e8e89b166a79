"""Consistent renaming: copies of examples in which the databases' words have changed places.

In a copy every word of schemas and cells stands for another one of its kind, the same throughout
the example. Nothing can then be answered by knowing that a `band` has an `album`; what is left to
learn is to read the names and values where they stand and to copy them. A small model learns that
many times faster from renamed examples than from the plain ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

from hsql_env.records import Trajectory
from hsql_jax.data import Example

SCHEMA = re.compile(r"^CREATE (?:TABLE|VIEW) ", re.MULTILINE)
KINDS = (re.compile(r"[a-z]{2,}"), re.compile(r"[A-Z][a-z]+"), re.compile(r"[2-9]"))
STRUCTURAL = 0.5  # a word in more than this share of the schemas, such as "id", keeps its place


def content_words(
    tokenizer: PreTrainedTokenizerFast, trajectories: Iterable[Trajectory]
) -> list[np.ndarray]:
    """Token ids of the words that schemas and sample rows hold, by kind: names, values, digits.

    A word of several tokens, one the tokenizer does not know, and a structural one are left out.
    """
    vocabulary = tokenizer.get_vocab()
    found: Counter[str] = Counter()
    schemas = 0
    for trajectory in trajectories:
        for message in trajectory.messages:
            if message.role == "tool" and SCHEMA.search(message.content):
                schemas += 1
                found.update(set(re.findall(r"[A-Za-z]+|\d", message.content)))
    words = [
        word
        for word, count in found.items()
        if word in vocabulary and (word.isdigit() or count <= STRUCTURAL * schemas)
    ]
    kinds = [sorted(vocabulary[word] for word in words if kind.fullmatch(word)) for kind in KINDS]
    return [np.array(kind, np.int32) for kind in kinds if kind]


def renamed(
    examples: Sequence[Example], kinds: Sequence[np.ndarray], vocab_size: int, seed: int
) -> list[Example]:
    """A copy of each example under a permutation of its own within each kind of word."""
    rng = np.random.default_rng(seed)
    copies = []
    for example in examples:
        mapping = np.arange(vocab_size)
        for kind in kinds:
            mapping[kind] = rng.permutation(kind)
        copies.append(Example(mapping[np.asarray(example.ids)], example.mask))
    return copies
