"""The trainings of docs/strategies.md, by name, and what the tests show of each.

Those of Fabric have its name in front; the others have a Trainer.
"""

FABRIC = "Fabric, "


def _with_fabric(*names):
    return [FABRIC + name for name in names]


ONE, COMPILED, DDP, PIPELINE = "single device", "single device, compiled", "ddp", "Fabric, pipeline"
ON_ONE = [ONE, f"{ONE}, bf16-mixed", f"{ONE}, bf16-true", f"{ONE}, 16-true", f"{ONE}, 64-true"]
# They change when something is computed, and no bit of the result.
SAME_BITS = [f"{ONE}, checkpointing", f"{ONE}, reentrant checkpointing"]
SAME_BITS += [f"{COMPILED} layers", f"{COMPILED} module"]
ON_ONE += [*SAME_BITS, f"{ONE}, torch.func", f"{ONE}, float8"]
LOGICAL = "ddp_d9m, logical ranks"
OF_DDP = ["ddp", "ddp, unused parameters", "ddp, fp16_compress_hook", "ddp, static_graph"]
REPLICATED = [*OF_DDP, "ddp, bf16-mixed"]
FLAT, HYBRID = "fsdp1, flat parameters", "fsdp1, hybrid"
FLAT_ONES, HYBRIDS = [FLAT, FABRIC + FLAT], [HYBRID, FABRIC + HYBRID]
SHARDED = [
    "fsdp1",
    "fsdp1, wrapped layers",
    "fsdp2",
    "fsdp2, bf16-true",
    "fsdp2, CPU offload",
    "tp",
]
SHARDED_ON_FOUR = ["fsdp1, 4 ranks", "fsdp2, 4 ranks", "tp, 4 ranks", "fsdp2 and tp"]
# These start two processes for each training.
LAUNCHED = ["ddp_spawn", "ddp_fork"]
FABRIC_LAUNCHED = _with_fabric(*LAUNCHED)
WITH_HOROVOD = ["horovod_d9m", "horovod_d9m, logical ranks"]
# By the number of processes.
LAUNCHES = {
    1: [*ON_ONE, FABRIC + ONE],
    # That with logical ranks is the last one: its errors close the connections of the ranks.
    2: [
        *(*REPLICATED, *SHARDED, FLAT, *_with_fabric(*OF_DDP, "fsdp1", FLAT, "fsdp2", "tp")),
        *(PIPELINE, LOGICAL),
    ],
    4: [*SHARDED_ON_FOUR, "hsdp", HYBRID, *_with_fabric("hsdp", "fsdp2 and tp", HYBRID)],
}
OTHERS = [*LAUNCHED, *FABRIC_LAUNCHED, *WITH_HOROVOD]
ALL = [*LAUNCHES[1], *LAUNCHES[2], *LAUNCHES[4], *OTHERS]
# Steps run twice.
REPEATED = [*ON_ONE, *REPLICATED, LOGICAL, *LAUNCHED, *WITH_HOROVOD]
# In these a rank changes a copy that it has with others.
COPIES = [*REPLICATED, LOGICAL, *OTHERS, *_with_fabric(*OF_DDP, "hsdp"), "hsdp", *HYBRIDS]
DIVIDED = [*SHARDED, FLAT, *SHARDED_ON_FOUR, PIPELINE]
DIVIDED += _with_fabric("fsdp1", FLAT, "fsdp2", "tp", "fsdp2 and tp")
# DDP computes the same sums of two gradients.
WHOLE = ["fsdp1", "fsdp1, wrapped layers", "fsdp2", "fsdp2, CPU offload"]
WHOLE += _with_fabric("fsdp1", "fsdp2")
TENSOR_PARALLEL = ["tp", "tp, 4 ranks", "fsdp2 and tp", *_with_fabric("tp", "fsdp2 and tp")]
# These are resumed from full checkpoints, too.
FULL = ["fsdp1", "fsdp2", "tp", "tp, 4 ranks", "hsdp", "fsdp2 and tp"]
FULL += _with_fabric("fsdp2", "tp", "hsdp", "fsdp2 and tp")
# In these `d9m locate` finds the fault.
LOCATED = [ONE, f"{COMPILED} module", "ddp", LOGICAL, "fsdp1", "fsdp2", "tp", PIPELINE]
LOCATED += _with_fabric(ONE, "ddp", "ddp_spawn", "fsdp1", FLAT, "fsdp2", "tp", "hsdp")
LOCATED += _with_fabric("fsdp2 and tp")
# In these an operation races, too.
RACING = ["ddp", "fsdp2", "Fabric, fsdp2"]
# In these one rank has another reference.
REFERRED = ["ddp", "Fabric, ddp"]
# Strategies that divide the weights refuse replays.
REFUSED = ["fsdp1", "fsdp2", "tp"]
# In these a rank drifts apart in every run.
DRIFTING = ["ddp", "tp"]
