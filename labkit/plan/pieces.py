"""Collects the terms of a piece of a stage: products, kernels that move bytes, collectives. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from labkit.config import ModelConfig
from labkit.plan.collectives import Beside, Group, collective
from labkit.plan.kernels import gemm, memory_bound
from labkit.plan.layout import Layout
from labkit.plan.machine import Machine
from labkit.plan.sizes import gate_and_up
from labkit.plan.terms import Term

Terms = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Passes:
    """Terms of a layer, or of another piece of a stage, for one microbatch."""

    forward: Terms = ()
    input_grad: Terms = ()
    weight_grad: Terms = ()
    recompute: Terms = ()
    """What the backward computes again."""


class Products(NamedTuple):
    """The three products of a linear layer."""

    forward: Term
    input_grad: Term
    weight_grad: Term


class Pieces:
    """Collects the terms of forward and backward; knows model, layout and machine."""

    def __init__(self, model: ModelConfig, layout: Layout, machine: Machine, tokens: int | None = None) -> None:
        """tokens: of a rank's microbatch inside tensor-parallel regions; None are those of the layout."""
        self.model, self.layout, self.machine = model, layout, machine
        self.tokens = layout.micro_batch * model.seq_length // layout.cp.size if tokens is None else tokens
        self.between = self.tokens // (layout.tp.size if layout.sequence_parallel else 1)
        self.element = layout.element_bytes
        self.forward: list[Term] = []
        self.input_grad: list[Term] = []
        self.weight_grad: list[Term] = []

    def moves(self, where: list[Term], name: str, elements: float, per_element: float, *, part: str = "",
              launches: int = 1) -> None:  # fmt: skip
        """Append a memory-bound kernel."""
        where.append(memory_bound(self.machine, name, elements, per_element, part=part, launches=launches))

    def gemm(self, name: str, shape: tuple[int, int, int], *, part: str = "", groups: int = 1, linear: bool = True,
             weight_gradient: bool = False) -> Term:  # fmt: skip
        """Return the time of a product of linear layers, or of another one."""
        layout = self.layout
        return gemm(
            self.machine,
            name,
            shape,
            precision=layout.linear_precision if linear else layout.precision,
            software=layout.software.name,
            weight_gradient=weight_gradient,
            groups=groups,
            part=part,
        )

    def sends(self, where: list[Term], name: str, axis: str, kind: str, size: float, group: Group, *,
              hidden: float = 0.0, count: int = 1, part: str = "") -> None:  # fmt: skip
        """Append `count` collectives, each beside `hidden` seconds of computation, unless their group has one rank."""
        if group.size > 1:
            beside = Beside(hidden, self.layout.software.overlap_slowdown)
            where.append(collective(self.machine, name, axis, kind, size, group, beside=beside, count=count, part=part))

    def linear(self, name: str, rows: int, columns: int, depth: int, *, part: str = "", groups: int = 1) -> Products:
        """Append the three products of a linear layer [rows, depth] x [depth, columns], and return them.

        Operands in fp8 are cast once for each of the three products that need them (arXiv 2209.05433): the input and
        the output gradient are read in 16 bits and written twice, as they are and transposed.
        """
        shape, back, across = (rows, columns, depth), (rows, depth, columns), (depth, columns, rows)
        name_of_weights = f"{name}, weight gradient"
        made = Products(
            self.gemm(name, shape, part=part, groups=groups),
            self.gemm(f"{name}, input gradient", back, part=part, groups=groups),
            self.gemm(name_of_weights, across, part=part, groups=groups, weight_gradient=True),
        )
        for where, term in zip((self.forward, self.input_grad, self.weight_grad), made, strict=True):
            where.append(term)
        if self.layout.linear_precision == "fp8":
            self.moves(self.forward, f"{name}, cast to fp8", groups * rows * depth, self.element + 2, part=part)
            self.moves(self.input_grad, f"{name}, cast to fp8", groups * rows * columns, self.element + 2, part=part)
        return made

    def activation(self, outputs: float, *, part: str = "") -> None:
        """The activation between two matrices: it reads one or two columns for each that it writes; backward also the
        gradient."""
        model, e = self.model, self.element
        read = gate_and_up(model)
        bias = model.bias and not self.layout.software.fused_elementwise
        self.moves(self.forward, "activation", outputs, (read + 1 + 2 * bias) * e, part=part, launches=1 + bias)
        self.moves(self.input_grad, "activation, backward", outputs, (2 * read + 1 + bias) * e, launches=1 + bias)

    def passes(self) -> Passes:
        """Return the terms collected."""
        return Passes(tuple(self.forward), tuple(self.input_grad), tuple(self.weight_grad))
