"""Budgets: what a stream may cost, or how wrong it may be, kept while it runs.

A budget is a value that says what to hold. A stream makes a controller of it, which looks at what
each step told and chooses the policy of the next. It changes results through the selection alone.
"""

from eventful.budget.base import Budget, BudgetReport, BudgetWarning, Controller, Facts, Told, Turn
from eventful.budget.error import ErrorBudget
from eventful.budget.memory import MemoryBudget
from eventful.budget.operations import OperationsBudget
from eventful.budget.time import LatencyBudget, RateBudget

__all__ = [
    "Budget",
    "BudgetReport",
    "BudgetWarning",
    "Controller",
    "ErrorBudget",
    "Facts",
    "LatencyBudget",
    "MemoryBudget",
    "OperationsBudget",
    "RateBudget",
    "Told",
    "Turn",
]
