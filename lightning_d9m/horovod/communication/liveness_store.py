"""A store on rank 0 in which the ranks report their status after a collective has failed."""

from datetime import timedelta

from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.rank_store import connect_store
from lightning_d9m.recording.rank_liveness import RankLiveness, identify_process

_CONNECT_TIMEOUT = timedelta(seconds=10)


def connect_liveness(communicator: Communicator) -> RankLiveness | None:
    """Connect all ranks to a store on rank 0; every rank must call this.

    Returns:
        None for a single rank, or if a rank cannot connect: then no error names the lost ranks.
    """
    if communicator.size == 1:
        return None
    store = connect_store(communicator.rank, communicator.gather_objects, _CONNECT_TIMEOUT)
    process = (*identify_process(), int(store is not None))
    gathered = communicator.gather_objects(process)
    if store is None or not all(is_connected for *_, is_connected in gathered):
        return None
    return RankLiveness(store, communicator.rank, [(host, pid) for host, pid, _ in gathered])
