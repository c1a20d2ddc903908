"""From measured rates to the rules of a table."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv._src.tuning.copy_table import SMALLEST, Candidate, CopySize, Rule, last_matching_rule

SAME_RATE = 0.03  # of the best rate: candidates that near are equally fast, and SMs decide
# What may be refused, and so decides between the others: the ids are on the device, or blocks are
# not what Pallas copies.
SCENARIOS: tuple[tuple[str, ...], ...] = ((), ("dma",), ("pallas",), ("dma", "pallas"))


def pick(measured: Sequence[Candidate]) -> Candidate:
    """Of the candidates that are as good as the fastest the one with the fewest SMs."""
    enough = (1 - SAME_RATE) * max(map(_rate_of, measured))
    fast = [candidate for candidate in measured if _rate_of(candidate) >= enough]
    return min(fast, key=lambda candidate: (candidate.num_sms, -_rate_of(candidate)))


def rank(measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Each implementation once: what to pick, what to pick where that can't serve, and so on."""
    ranked: list[Candidate] = []
    while left := _without(measured, [candidate.implementation for candidate in ranked]):
        ranked.append(pick(left))
    return tuple(ranked)


def rules_of(rates: Sequence[tuple[CopySize, Sequence[Candidate]]]) -> tuple[Rule, ...]:
    """Rules for one direction: of the measured sizes those from which on to decide anew.

    The rates of a rule are those of the largest size that it holds for.
    """
    rules: list[Rule] = []
    words: set[int] = set()
    for size, measured in sorted(rates, key=lambda entry: entry[0]):
        if size.word_bytes not in words:  # the first of its alignment: holds for what is smaller
            minima = SMALLEST._replace(word_bytes=size.word_bytes if words else 1)
            rules.append(Rule(minima, rank(measured)))
            words.add(size.word_bytes)
            continue
        rule = last_matching_rule(rules, size)
        if _still_good(rule, measured):
            now = {candidate[:2]: candidate for candidate in measured}
            updated = tuple(now.get(candidate[:2], candidate) for candidate in rule.candidates)
            rules[rules.index(rule)] = Rule(rule.minima, updated)
        else:
            rules.append(Rule(size, rank(measured)))
    return tuple(rules)


def _still_good(rule: Rule, measured: Sequence[Candidate]) -> bool:
    """Whether what a rule takes is fast enough here, on no more SMs than it has to be."""
    for refused in SCENARIOS:
        possible = _without(measured, refused)
        if not possible:
            continue
        taken = [candidate[:2] for candidate in _without(rule.candidates, refused)][:1]
        here = [candidate for candidate in possible if candidate[:2] in taken]
        if not here or here[0].num_sms > pick(possible).num_sms:
            return False
        if _rate_of(here[0]) < (1 - SAME_RATE) * max(map(_rate_of, possible)):
            return False
    return True


def _rate_of(candidate: Candidate) -> float:
    return candidate.gb_per_s or 0.0


def _without(candidates: Sequence[Candidate], names: Sequence[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.implementation not in names]
