"""The beginning of a program that leaves ledgers as a training does, without importing torch.

It obeys the variables of ``d9m repeat --interrupt``, as the callback in a project does. ``survey``
is what it then reports; ``run`` is the number of the run, from the folder that it was given.
"""

PROGRAM = '''
import json, os, re, signal, sys, time
from pathlib import Path
from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.engine.ledger.format.records import Digests, End, Header, RunFacts
from lightning_d9m.engine.ledger.format.writer import LedgerWriter

ledgers = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"])
run = int((re.findall("[0-9]+", ledgers.name) or "0")[0])
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
request, resume = map(os.environ.get, ("LIGHTNING_D9M_INTERRUPT", "LIGHTNING_D9M_RESUME"))
checkpoints = Path(os.environ.get("LIGHTNING_D9M_CHECKPOINT_DIR", ""))
survey = []

def train(value=7, *, stack=None, settings=None, obeys=True):
    """Leave the ledger of one fit, and return its path; only rank 0 does.

    The weights have one value, or an iterable gives that of each epoch.
    """
    if rank:
        return None
    path = rank_path(create_ledger_folder(ledgers), 0)
    with LedgerWriter(path) as ledger:
        ledger.write(Header(rank=0, world_size=size, fit=0, seed=42, created="", package="0",
                            settings=settings or {}, stack=stack or {}))
        ledger.write(RunFacts(model="m", parameters=1, train=[]))
        if request and request != "survey" and obeys:
            (checkpoints / "interrupted.ckpt").write_text(request)
            (checkpoints / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if request == "survey" and survey:
            (checkpoints / "survey").write_text(json.dumps(survey))
        moments = [(moment, value) for moment in ("initial", "epoch", "final")]
        if not isinstance(value, int):
            moments = (("epoch", own) for own in value)
        for number, (moment, own) in enumerate(moments):
            epoch = 0 if isinstance(value, int) else number
            digest = f"{own:032x}"
            ledger.write(Digests(moment=moment, epoch=epoch, step=epoch, totals={"weights": digest},
                                 groups={"weights": {"w": digest}},
                                 loss=(0.1).hex()))
        ledger.write(End(status="finished"))
    return path
'''
