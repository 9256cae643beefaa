"""The kinds of probes."""

# In the order in which a batch meets them.
PROBE_KINDS = (
    "rng",
    "weight",
    "buffer",
    "optimizer",
    "batch",
    "input",
    "output",
    "op",
    "monitor",
    "loss",
    "grad_output",
    "local_gradient",
    "gradient",
    "scalar",
)
ALL = "all"
# What the module that holds everything is called; its own name is empty.
ROOT = "(model)"
