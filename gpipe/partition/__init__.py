"""Cutting layers into stages of even cost.

A stage costs the sum of its layers' costs, divided by its speed, plus the boundary costs at both
its ends: it receives its input and sends its output, and the gradients the other way. Boundary
costs are not divided: they are those of the link.

"variance" is that of the stages' costs, each weighted by the speed of its stage. What is minimised
is the weighted sum of squares. It comes to the same as long as boundaries cost nothing; where they
do, a dearer cut can lower a variance, but never this.

The result is exact, whatever the scale of the numbers: the optimum, and among equals the one that
`balance_costs` promises. int64 finds it where it holds all sums; otherwise floats find the few cuts
that matter, and Python's integers decide between them. Only where these are too many do floats
decide: above some hundred layers, with numbers beyond int64, and either with boundary costs and
"bottleneck", or with countless equals, as when stages outnumber the layers that cost anything.
Slowest stage and sum of squares then are the optimum up to rounding (1e-12), but ties may be broken
in another way.
"""

from gpipe.partition.balance import balance_costs

__all__ = ["balance_costs"]
