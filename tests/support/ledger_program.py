"""The beginning of a program that leaves ledgers as a training does, without importing torch.

It obeys variables as the callback in a project does: it saves at ``points``, resumes, and ends
early. ``run`` is the number of the run, from the folder that it was given.
"""

PROGRAM = '''
import json, os, re, signal, sys, time
from contextlib import contextmanager
from pathlib import Path
asked = os.environ.pop("LIGHTNING_D9M", "")  # with it the package imports torch
from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.engine.ledger.format.records import (
    Checkpoint, Digests, End, Header, Resume, RunFacts)
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
os.environ["LIGHTNING_D9M"] = asked

ledgers = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"])
run = int((re.findall("[0-9]+", ledgers.name) or "0")[0])
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
request, resume = map(os.environ.get, ("LIGHTNING_D9M_INTERRUPT", "LIGHTNING_D9M_RESUME"))
checkpoints = Path(os.environ.get("LIGHTNING_D9M_CHECKPOINT_DIR", ""))
points = ["step-1", "accumulated-1"]

@contextmanager
def noting_failure(ledger):
    try:
        yield
    except BaseException as error:
        ledger.write(End.failed(error))
        raise

def train(value=7, *, stack=None, settings=None, obeys=True):
    """Leave the ledger of one fit, and return its path; only rank 0 does.

    The weights have one value, or an iterable gives that of each epoch.
    """
    if rank:
        return None
    path = rank_path(create_ledger_folder(ledgers), 0)
    kind, _, last = (request or "").partition(":")
    last = "" if kind == "keep" else last  # it names the run beside it
    with LedgerWriter(path) as ledger, noting_failure(ledger):
        ledger.write(Header(rank=0, world_size=size, fit=0, seed=42, created="", package="0",
                            program={"segment": request} if last else {},
                            settings=settings or {}, stack=stack or {}))
        if resume:
            ledger.write(Resume(**json.loads(Path(resume).read_text())))
        ledger.write(RunFacts(model="m", parameters=1, train=[]))
        moments = [("initial", 0, 0, value), ("epoch", 0, 4, value), ("final", 0, 4, value)]
        if not isinstance(value, int):
            moments = (("epoch", number, number, own) for number, own in enumerate(value))
        for moment, epoch, step, own in moments:
            if resume and moment == "initial":
                continue
            digest = f"{own:032x}"
            ledger.write(Digests(moment=moment, epoch=epoch, step=step, totals={"weights": digest},
                                 groups={"weights": {"w": digest}},
                                 loss=(0.1).hex()))
            for name in points if kind == "points" and moment == "initial" else ():
                checkpoints.mkdir(exist_ok=True)
                saved = checkpoints / f"{name}.ckpt"
                place = {"epoch": 0, "step": 1, "batch": 1}
                parent = {"parent": str(path.parent), "parent_check": ledger.chain_hash}
                saved.write_text(json.dumps(parent | place))
                ledger.write(Checkpoint(path=str(saved), **place))
            if kind == "epoch" and epoch >= int(last):
                break
        ledger.write(End(status="stopped" if last else "finished"))
        if last and obeys:
            (checkpoints / "killed").touch()
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return path
'''
