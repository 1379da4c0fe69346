"""What came of the checks of a backend, for people and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT, BROKEN, PARTLY, UNCHECKED = "kept", "BROKEN", "partly checked", "not checked"


@dataclass
class Result:
    """What came of one check.

    Attributes:
        name: of the check.
        violations: what is not as the contract says, one line each.
        unchecked: what could not be checked, and why.
        cases: how many things were checked.
    """

    name: str
    violations: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    cases: int = 0

    def expect(self, holds: bool, violation: str) -> bool:
        """Count a case; where it does not hold, note the violation. Return whether it holds."""
        self.cases += 1
        if not holds and violation not in self.violations:
            self.violations.append(violation)
        return holds

    @property
    def state(self) -> str:
        """In a word or two."""
        if self.violations:
            return BROKEN
        if self.unchecked:
            return PARTLY if self.cases else UNCHECKED
        return KEPT


@dataclass(frozen=True)
class Report:
    """All checks of one backend.

    Attributes:
        backend: name of its class.
        results: in the order in which they were checked.
    """

    backend: str
    results: Sequence[Result]

    @property
    def violations(self) -> list[str]:
        """Each with the name of its check, one line each."""
        return [f"{one.name}: {line}" for one in self.results for line in one.violations]

    def __str__(self) -> str:
        width = max(len(one.name) for one in self.results)
        lines = [f"The contract of a backend (backends/base.py), {self.backend}:"]
        for one in self.results:
            lines.append(f"  {one.name:<{width}}  {one.state}, {one.cases} cases")
            lines += [f"  {'':<{width}}    violation: {line}" for line in one.violations]
            lines += [f"  {'':<{width}}    not checked: {line}" for line in one.unchecked]
        return "\n".join(lines)


class BackendContractError(AssertionError):
    """A backend does not keep the contract; the message has one line a violation."""

    def __init__(self, report: Report) -> None:
        count = len(report.violations)
        noun = "violation" if count == 1 else "violations"
        lines = [f"{report.backend}: {count} {noun} of backends/base.py", *report.violations]
        super().__init__("\n".join(lines))
        self.report = report
