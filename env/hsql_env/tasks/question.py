"""Questions: the paraphrases of every template family, filled with a candidate's words."""

from __future__ import annotations

from hsql_env.tasks.candidate import Candidate

_COUNT = (
    "How many {table} rows have {noun}?",
    "Count the {table} rows where {clause}.",
    "What is the number of {table} rows with {noun}?",
)

_AGGREGATE = (
    "What is the {aggregate} {number} of all {table} rows?",
    "Give the {aggregate} {number} over every {table}.",
    "Find the {aggregate} {number} in {table}.",
)

PHRASES: dict[str, tuple[str, ...]] = {
    "lookup": (
        "What is the {columns} of the {table} with {noun}?",
        "Give the {columns} of the {table} where {clause}.",
        "Find the {columns} for the {table} with {noun}.",
    ),
    "list_filter": (
        "List the {columns} of every {table} with {noun}.",
        "Which {table} rows have {noun}? Give the {columns}.",
        "Show the {columns} of each {table} where {clause}.",
    ),
    "count_filter": _COUNT,
    "count_num": _COUNT,
    "text_number/count": _COUNT,
    "agg": _AGGREGATE,
    "text_number/agg": _AGGREGATE,
    "agg/filtered": (
        "What is the {aggregate} {number} of {table} rows with {noun}?",
        "Give the {aggregate} {number} of every {table} where {clause}.",
        "Find the {aggregate} {number} for {table} rows with {noun}.",
    ),
    "superlative": (
        "Which {table} has the {best} {number}? Give its {columns}.",
        "What is the {columns} of the {table} with the {best} {number}?",
        "Find the {columns} of the {table} with the {best} {number}.",
    ),
    "topk": (
        "List the {columns} of the {k} {table} rows with the {best} {number}, {best} first.",
        "Which {k} {table} rows have the {best} {number}? Give the {columns}, {best} first.",
        "Show the {columns} for the {k} {best} {number} in {table}, {best} first.",
    ),
    "group_count": (
        "How many {table} rows are there for each {category}? Give the {columns}.",
        "Count the {table} rows per {category}. Show the {columns}.",
        "For each {category} of {table}, give the {columns}.",
    ),
    "group_top": (
        "Which {category} has the {most} {table} rows?",
        "Find the {category} with the {most} {table} rows.",
    ),
    "distinct_count": (
        "How many different {category} values does {table} have?",
        "Count the distinct {category} values in {table}.",
        "What is the number of different {category} values of {table} rows?",
    ),
    "date_year/count": (
        "How many {table} rows have {date} in {year}?",
        "Count the {table} rows with {date} in the year {year}.",
    ),
    "date_year/list": (
        "List the {columns} of every {table} with {date} in {year}.",
        "Which {table} rows have {date} in the year {year}? Give the {columns}.",
    ),
    "is_null/count": (
        "How many {table} rows have no {number}?",
        "Count the {table} rows where {number} is missing.",
    ),
    "is_null/list": (
        "List the {columns} of every {table} without {number}.",
        "Which {table} rows have no {number}? Give the {columns}.",
    ),
    "above_average": (
        "List the {columns} of every {table} with {number} {side} the average.",
        "Which {table} rows have {number} {side} average? Give the {columns}.",
        "Show the {columns} of each {table} whose {number} is {side} the average {number}.",
    ),
    "join_list": (
        "List the {columns} of every {child} whose {parent} has {noun}.",
        "Which {child} rows belong to {a_parent} with {noun}? Give the {columns}.",
        "Show the {columns} of each {child} of {a_parent} where {parent} {clause}.",
    ),
    "join_list/parent": (
        "What is the {columns} of the {parent} of the {child} with {noun}?",
        "Find the {parent} {columns} for the {child} with {noun}.",
        "Give the {columns} of the {parent} that the {child} with {noun} belongs to.",
    ),
    "join_count": (
        "How many {child} rows belong to {a_parent} with {noun}?",
        "Count the {child} rows whose {parent} has {noun}.",
        "What is the number of {child} rows where the {parent} {clause}?",
    ),
    "join_agg": (
        "What is the {aggregate} {number} of {child} rows whose {parent} has {noun}?",
        "Give the {aggregate} {number} of every {child} of {a_parent} with {noun}.",
        "Find the {aggregate} {child} {number} where the {parent} {clause}.",
    ),
    "join_group/count": (
        "Count the {child} rows by {parent} {label}. Show the {columns}.",
        "For each {parent} {label} with {child} rows, give the {columns}.",
    ),
    "join_group/agg": (
        "Find the {aggregate} {child} {number} by {parent} {label}. Show the {columns}.",
        "For each {parent} {label} with {child} rows, give the {columns} of its {child} rows.",
    ),
    "join_superlative/row": (
        "What is the {columns} of the {parent} of the {child} with the {best} {number}?",
        "Which {parent} has the {child} with the {best} {number}? Give the {parent} {columns}.",
        "Find the {parent} {columns} for the {child} with the {best} {number}.",
    ),
    "join_superlative/count": (
        "Which {parent} has the most {child} rows? Give its {columns}.",
        "Find the {columns} of the {parent} with the most {child} rows.",
        "What is the {columns} of the {parent} with the most {child} rows?",
    ),
}


def write_question(candidate: Candidate) -> str:
    """The candidate's question, in the paraphrase it drew. Raises KeyError for an unknown kind."""
    key = f"{candidate.kind}/{candidate.variant}" if candidate.variant else candidate.kind
    phrases = PHRASES[key]
    phrase = phrases[int(candidate.phrasing * len(phrases))]
    return phrase.format(columns=" and ".join(candidate.returns), **candidate.slots)


def article(noun: str) -> str:
    """`noun` with its indefinite article."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"
