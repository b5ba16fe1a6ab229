"""The operators of the generator, by name: one function each, in a module a kind."""

from kbrl_async.kernels.generator.operators import moving, pointwise, products, rows
from kbrl_async.kernels.generator.operators.table import OPERATORS, DrawnOperator

__all__ = ["OPERATORS", "DrawnOperator", "moving", "pointwise", "products", "rows"]
