"""Figures that have a goal: what each scenario returns under `figures`."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its goal.

    Attributes:
        name: What was measured.
        reached: The value, or None where it could not be measured.
        relation: How the value should compare with the goal.
        goal: The goal.
        unit: Of both; empty for a ratio.
        note: What limits the figure, or why it is missing.
    """

    name: str
    reached: float | None
    relation: Literal[">=", "<="]
    goal: float
    unit: str = ""
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the goal was reached."""
        if self.reached is None:
            return False
        if self.relation == ">=":
            return self.reached >= self.goal
        return self.reached <= self.goal

    def as_json(self) -> dict[str, Any]:
        """The attributes and whether the goal was met."""
        return asdict(self) | {"met": self.met}


def at_least(name: str, reached: float | None, goal: float, **more: str) -> dict[str, Any]:
    """A figure that should not be below its goal, as JSON; `more`: `unit`, `note`."""
    return Figure(name, reached, ">=", goal, **more).as_json()


def at_most(name: str, reached: float | None, goal: float, **more: str) -> dict[str, Any]:
    """A figure that should not be above its goal, as JSON; `more`: `unit`, `note`."""
    return Figure(name, reached, "<=", goal, **more).as_json()


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each number that all rounds hold under the same name."""
    names = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {name: median(entry[name] for entry in rounds) for name in names}
