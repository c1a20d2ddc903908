"""Records made before records had checks: their targets, classified as those of today are.

Figures are those of the file. To be removed with the last such record.
"""

import re
from typing import Any

Content = dict[str, Any]

# Pattern of the names of targets that no benchmark records any more, and the reason.
RETIRED = {
    r"store, .*speedup over one device_put per page.*": (
        "12x a `device_put` per page in stores: the baseline depends on the page size alone, from "
        "1.6x at 64 KiB to 15x at 8 KiB. The times stay in the record"
    ),
    r".*after 8 matrix products: host time \(blocking\)": (
        "host time of a busy step at most half its latency: both the products and the share "
        "are choices of the benchmark, and 0.014 to 0.19 say nothing of a step. The times stay"
    ),
    r"decode step of \d+ requests: metadata overhead": (
        "metadata overhead of a step as a fraction of that on the host: a quotient of two small "
        "differences of equal times. The three times of the step stay"
    ),
}
CHECKED_UNITS = {"tests", "errors", "tokens", "pages", "elements", "of a sample", "of the pool"}
WITHIN = ", within 2 standard errors"


def adapted(content: Content) -> Content:
    """The content with `checks`, and verdicts that errors can't help."""
    if "checks" in content:
        return content
    kept = [t for t in content["targets"] if not any(re.fullmatch(r, t["name"]) for r in RETIRED)]
    checks = [target for target in kept if _is_check(target)]
    targets = [_strict(target) for target in kept if not _is_check(target)]
    return {**content, "targets": targets, "checks": checks}


def _is_check(target: Content) -> bool:
    want, name = target["want"], target["name"]
    exact = want["op"] == "==" or want["value"] == 0 or want["unit"] in CHECKED_UNITS
    return exact or "staging memory" in name


def _strict(target: Content) -> Content:
    """A limit of 1 + 2 standard errors becomes 1, with that error."""
    if not target["name"].endswith(WITHIN):
        return target
    want = target["want"]
    error = (want["value"] - 1) / 2
    strict = {
        "name": target["name"].removesuffix(WITHIN), "want": {**want, "value": 1}, "error": error,
    }  # fmt: skip
    met = None if target["got"] is None else target["got"] + 2 * error <= 1
    return {**target, **strict, "met": met}
