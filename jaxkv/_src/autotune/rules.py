"""Conversion of measured rates to the rules of a table."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv._src.tuning.copy_table import SMALLEST, Candidate, CopySize, Rule, last_matching_rule

SAME_RATE = 0.02  # relative to the best rate; within it, fewer SMs win
# Sets of unsupported implementations: dma with ids on the device, pallas with blocks of an
# unsupported layout, size or dtype.
SCENARIOS: tuple[tuple[str, ...], ...] = ((), ("dma",), ("pallas",), ("dma", "pallas"))


def pick(measured: Sequence[Candidate]) -> Candidate:
    """The candidate with the fewest SMs among those within SAME_RATE of the fastest."""
    enough = (1 - SAME_RATE) * max(map(_rate_of, measured))
    fast = [candidate for candidate in measured if _rate_of(candidate) >= enough]
    return min(fast, key=lambda candidate: (candidate.num_sms, -_rate_of(candidate)))


def rank(measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Each implementation once: the best candidate, then its fallbacks in order."""
    ranked: list[Candidate] = []
    while left := _without(measured, [candidate.implementation for candidate in ranked]):
        ranked.append(pick(left))
    return tuple(ranked)


def rules_of(rates: Sequence[tuple[CopySize, Sequence[Candidate]]]) -> tuple[Rule, ...]:
    """Rules for one direction; a rule begins at each measured size where the choice changes.

    The rates of a rule are those of the largest measured size to which it applies, of those at
    which all of its candidates were measured: rates of different sizes are not comparable.
    """
    rules: list[Rule] = []
    words: set[int] = set()
    for size, measured in sorted(rates, key=lambda entry: entry[0]):
        if size.word_bytes not in words:  # first of its alignment: applies to smaller copies too
            minima = SMALLEST._replace(word_bytes=size.word_bytes if words else 1)
            rules.append(Rule(minima, rank(measured), size))
            words.add(size.word_bytes)
            continue
        rule = last_matching_rule(rules, size)
        if _still_good(rule, measured):
            now = {candidate[:2]: candidate for candidate in measured}
            keys = [candidate[:2] for candidate in rule.candidates]
            if all(key in now for key in keys):
                updated = tuple(now[key] for key in keys)
                rules[rules.index(rule)] = Rule(rule.minima, updated, size)
        else:
            rules.append(Rule(size, rank(measured), size))
    return tuple(rules)


def _still_good(rule: Rule, measured: Sequence[Candidate]) -> bool:
    """Whether a rule's choice is within SAME_RATE of the best one, without excess SMs."""
    for unsupported in SCENARIOS:
        possible = _without(measured, unsupported)
        if not possible:
            continue
        selected_keys = [candidate[:2] for candidate in _without(rule.candidates, unsupported)][:1]
        selected = [candidate for candidate in possible if candidate[:2] in selected_keys]
        if not selected or selected[0].num_sms > pick(possible).num_sms:
            return False
        if _rate_of(selected[0]) < (1 - SAME_RATE) * max(map(_rate_of, possible)):
            return False
    return True


def _rate_of(candidate: Candidate) -> float:
    return candidate.gb_per_s or 0.0


def _without(candidates: Sequence[Candidate], names: Sequence[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.implementation not in names]
