"""Hidden causes of differences between two runs, and whether ``d9m locate`` shows their line.

Each cause stands in a helper module of a small training program in the style of real ones. The
lines that a user needs end in ``#!``. Runs are forks of a process that has imported torch; where
addresses must differ from run to run, they are new interpreters.

    python benchmarks/segments/hidden_causes.py [NAME ...]
"""

import io
import json
import sys
import tempfile
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from forking_python import shared_python

from lightning_d9m.tools.cli.main import main

BASE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=g)
    return x, x.sum(1, keepdim=True)
def prepare(model): pass
def dataset(x, y): return TensorDataset(x, y)
def batches(x, y): return DataLoader(dataset(x, y), batch_size=8, shuffle=True)
def augment(x): return x
def rate(step): return 0.05
def after(model, step): pass
"""
LOOP = """
import torch
from torch import nn
import helper
x, y = helper.data()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
helper.prepare(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for epoch in range(2):
    for bx, by in helper.batches(x, y):
        loss = nn.functional.mse_loss(model(helper.augment(bx)), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = helper.rate(step)
        optimizer.step()
        helper.after(model, step)
        step += 1
"""
TRAINER = """
import torch
from torch import nn
import lightning as L
import helper
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        helper.prepare(self.net)
    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(helper.augment(x)), y)
    def on_train_batch_end(self, *_):
        helper.after(self.net, self.global_step)
    def configure_optimizers(self):
        made = torch.optim.SGD(self.parameters(), lr=1.0)
        return [made], [torch.optim.lr_scheduler.LambdaLR(made, helper.rate)]
class Data(L.LightningDataModule):
    def train_dataloader(self):
        return helper.batches(*helper.data())
L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False).fit(Model(), datamodule=Data())
"""
# Name, then the helper's code; "fresh" needs new interpreters, "fit" trains with Lightning.
CAUSES = """
prefetch threads
    import queue, threading, time
    def batches(x, y):
        done, todo = queue.Queue(), queue.Queue()
        for n in torch.randperm(8).tolist(): todo.put(n)
        def fetch():
            while True:
                try: n = todo.get_nowait()
                except queue.Empty: return
                torch.randn(200, 200).mm(torch.randn(200, 200))
                done.put((x[8 * n:8 * n + 8], y[8 * n:8 * n + 8]))
        for _ in range(4): threading.Thread(target=fetch, daemon=True).start() #!
        for _ in range(8): yield done.get()
name of a temporary folder, fit
    import pathlib, tempfile
    def data():
        root = pathlib.Path(tempfile.mkdtemp())
        for n in range(8):
            shard = tempfile.mkdtemp(dir=root) #!
            torch.save(torch.randn(8, 4, generator=torch.Generator().manual_seed(n)), f"{shard}/x")
        x = torch.cat([torch.load(p) for p in sorted(root.rglob("x"))])
        return x, x.sum(1, keepdim=True)
scipy LatinHypercube, fit
    from scipy.stats import qmc
    def data():
        x = torch.tensor(qmc.LatinHypercube(4).random(64), dtype=torch.float32) #!
        return x, x.sum(1, keepdim=True)
scipy Sobol
    from scipy.stats import qmc
    def prepare(model):
        points = qmc.Sobol(4).random(8) #!
        with torch.no_grad(): model[0].weight.copy_(torch.tensor(points))
teacher of another process
    import subprocess, sys
    CODE = "import numpy as np; np.save('teacher.npy', np.random.default_rng().normal(size=(4, 1)))"
    def data():
        import numpy as np
        subprocess.run([sys.executable, "-c", CODE], check=True) #!
        w = torch.tensor(np.load("teacher.npy"), dtype=torch.float32) #!
        x = BASE_DATA()[0]
        return x, x @ w
queue filled by threads, fit
    import queue, threading
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, x, y): self.x, self.y = x, y
        def __iter__(self):
            q = queue.Queue()
            def fill(part):
                for n in range(part, 64, 4):
                    sum(range(200000)); q.put((self.x[n], self.y[n]))
            ts = [threading.Thread(target=fill, args=(p,)) for p in range(4)]
            for t in ts: t.start() #!
            for _ in range(64): yield q.get()
    def batches(x, y): return DataLoader(Stream(x, y), batch_size=8)
uuid4 in a split, fit
    import uuid
    def data():
        x, y = BASE_DATA()
        keys = [uuid.uuid4().hex for _ in x] #!
        order = sorted(range(64), key=keys.__getitem__)
        return x[order], y[order]
files by time
    import concurrent.futures, pathlib, tempfile
    def save(path, n):
        sum(range(30000)); torch.save(torch.full((8, 4), n / 8), path)
    def data():
        root = pathlib.Path("parts"); root.mkdir(exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(save, [root / f"{n}.pt" for n in range(8)], range(8))) #!
        files = sorted(root.iterdir(), key=lambda p: p.stat().st_mtime_ns) #!
        x = torch.cat([torch.load(p) for p in files])
        return x, x.sum(1, keepdim=True)
set of objects, fresh
    class Sample:
        def __init__(self, n): self.n = n
    def data():
        x, y = BASE_DATA()
        keep = {Sample(n) for n in range(64)}
        order = [s.n for s in keep] #!
        return x[order], y[order]
hash of an object, fresh
    class Key: pass
    def data():
        x, y = BASE_DATA()
        keys = [Key() for _ in x]
        order = sorted(range(64), key=lambda n: hash((keys[n], 1)) % 1009) #!
        return x[order], y[order]
sorted by id, fresh
    def data():
        x, y = BASE_DATA()
        rows = list(zip(x, y))
        rows.sort(key=lambda row: id(row) // 16 % 9973) #!
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
weak set, fresh
    import weakref
    class Part:
        def __init__(self, n): self.n = n
    def data():
        x, y = BASE_DATA()
        parts = [Part(n) for n in range(64)]
        order = [p.n for p in weakref.WeakSet(parts)] #!
        return x[order], y[order]
seed from the time
    import time
    import numpy as np
    def prepare(model):
        rng = np.random.default_rng(int(time.time() * 1e6)) #!
        with torch.no_grad(): model[0].weight.copy_(torch.tensor(rng.normal(size=(8, 4))))
seed from datetime
    import datetime
    import numpy as np
    def prepare(model):
        rng = np.random.default_rng(datetime.datetime.now().microsecond) #!
        with torch.no_grad(): model[0].weight.copy_(torch.tensor(rng.normal(size=(8, 4))))
listing of what threads wrote, fit
    import os, tempfile, threading
    def data():
        root = tempfile.mkdtemp(dir="/dev/shm") #!
        def write(n): sum(range(500000)); open(f"{root}/{n}", "w").close()
        ts = [threading.Thread(target=write, args=(n,)) for n in range(8)]
        for t in ts: t.start() #!
        for t in ts: t.join()
        order = [int(n) * 8 + k for n in os.listdir(root) for k in range(8)] #!
        x, y = BASE_DATA()
        return x[order], y[order]
numpy generator, fit
    import numpy as np
    noise = np.random.default_rng() #!
    def augment(x): return x + torch.tensor(noise.normal(size=x.shape), dtype=x.dtype)
split of scikit-learn
    import numpy as np
    from sklearn.model_selection import train_test_split
    def data():
        x, y = BASE_DATA()
        x, _, y, _ = train_test_split(x, y, train_size=48, random_state=np.random.RandomState()) #!
        return torch.as_tensor(x), torch.as_tensor(y)
torch generator
    def batches(x, y):
        g = torch.Generator()
        g.seed() #!
        return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=g)
random manual_seed, fit
    import secrets
    def prepare(model):
        torch.manual_seed(secrets.randbelow(2**31)) #!
        for layer in model: getattr(layer, "reset_parameters", lambda: 0)()
torch.seed
    def prepare(model):
        torch.seed() #!
        nn.init.normal_(model[0].weight)
unordered pool
    import multiprocessing, time
    def read(n): sum(range(100000)); return n
    def data():
        x, y = BASE_DATA()
        with multiprocessing.get_context("fork").Pool(4) as pool: #!
            order = list(pool.imap_unordered(read, range(64))) #!
        return x[order], y[order]
as_completed
    import concurrent.futures as cf
    def read(n): sum(range(100000)); return n
    def data():
        x, y = BASE_DATA()
        pool = cf.ThreadPoolExecutor(4)
        order = [f.result() for f in cf.as_completed([pool.submit(read, n) for n in range(64)])] #!
        return x[order], y[order]
clock of a collector
    import time
    class Cache:
        def __del__(self): torch.rand(1)
    last = [time.monotonic()]
    def after(model, step):
        if time.monotonic() - last[0] > 0.0015: #!
            Cache(); last[0] = time.monotonic() #!
shards by process
    import os
    def data():
        x, y = BASE_DATA()
        return x.roll(os.getpid() % 61, 0), y.roll(os.getpid() % 61, 0) #!
seed from a file's name, fit
    import tempfile, zlib
    def prepare(model):
        with tempfile.NamedTemporaryFile() as scratch: #!
            g = torch.Generator().manual_seed(zlib.crc32(scratch.name.encode()))
        nn.init.normal_(model[0].weight, generator=g)
asynchronous writes
    import threading
    def average(model):
        while True:
            for p in model.parameters(): p.data.mul_(0.999)
    def prepare(model): threading.Thread(target=average, args=(model,), daemon=True).start() #!
shuffle of the system, fit
    import random
    rng = random.SystemRandom()
    def data():
        x, y = BASE_DATA()
        order = list(range(64)); rng.shuffle(order) #!
        return x[order], y[order]
private random.Random, fit
    import random
    class Mask:
        def __init__(self): self.rng = random.Random() #!
        def __call__(self, x): return x * (self.rng.random() > 0.5)
    augment = Mask()
seed without an argument
    import random
    def batches(x, y):
        random.seed() #!
        order = random.sample(range(64), 64)
        return DataLoader(torch.utils.data.Subset(TensorDataset(x, y), order), batch_size=8)
rate by elapsed time, fit
    import time
    start = time.perf_counter()
    def rate(step): return 0.05 / (1 + time.perf_counter() - start) #!
counter of runs
    import pathlib
    def prepare(model):
        count = pathlib.Path("runs.txt")
        number = int(count.read_text()) if count.exists() else 0 #!
        count.write_text(str(number + 1))
        torch.nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(number))
state of the machine
    def augment(x):
        with open("/proc/uptime") as f: busy = float(f.read().split()[0]) #!
        return x + (busy % 1) * 1e-3
output of a program
    import subprocess
    def prepare(model):
        seed = int(subprocess.check_output(["date", "+%N"])) #!
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
rows of a database
    import sqlite3
    def data():
        x, y = BASE_DATA()
        db = sqlite3.connect("rows.db") #!
        db.execute("create table if not exists t (n)"); db.execute("delete from t")
        db.executemany("insert into t values (?)", [(n,) for n in range(64)])
        order = [n for n, in db.execute("select n from t order by random()")] #!
        return x[order], y[order]
entropy in a collate function, fit
    import os
    def collate(rows):
        x, y = map(torch.stack, zip(*rows))
        return x + os.urandom(1)[0] / 256, y #!
    def batches(x, y): return DataLoader(TensorDataset(x, y), 8, collate_fn=collate, num_workers=2)
environment
    import os, zlib
    def prepare(model):
        seed = zlib.crc32(repr(sorted(os.environ.items())).encode()) #!
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
"""


def list_causes():
    name, lines = "", []
    for line in [*CAUSES.strip("\n").split("\n"), "end"]:
        if line.startswith("    "):
            lines.append(line[4:])
            continue
        if name:
            title, *flags = name.split(", ")
            yield title, flags, "\n".join(lines)
        name, lines = line, []


def measure(flags, code):
    """Return whether the runs differed, the kind of cause, and whether the line was shown."""
    helper = f"{BASE}\nBASE_DATA = data\n{code}\n"
    wanted = {n for n, line in enumerate(helper.split("\n"), 1) if line.endswith("#!")}
    with tempfile.TemporaryDirectory() as place, chdir(place):
        Path("helper.py").write_text(helper.replace("#!", ""))
        Path("train.py").write_text(TRAINER if "fit" in flags else LOOP)
        python = sys.executable if "fresh" in flags else shared_python()
        words = ["locate", "--json", "--one-by-one", "-o", "out", "--", python, "train.py"]
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as said:
            status = main(words)
        if status == 2:
            return "failed", said.getvalue()[-1500:], []
        found = json.loads(printed.getvalue())
        scanned = {f["line"] for f in found.get("lines", ()) if f["file"].endswith("helper.py")}
        places = [
            (e["line"] if e["file"].endswith("helper.py") else 0, e["kind"])
            for e in found.get("outside", ())
        ]
        watched = [line for line, _ in places]
        shown = "watch" * bool(wanted & set(watched)), "scan" * bool(wanted & scanned)
        rank = min((watched.index(line) + 1 for line in wanted & set(watched)), default=0)
        return found.get("cause", "equal"), " ".join(filter(None, shown)), (rank, places)


def run():
    chosen, rows = sys.argv[1:], []
    for title, flags, code in list_causes():
        if chosen and title not in chosen:
            continue
        start = time.monotonic()
        kind, shown, seen = measure(flags, code)
        rows.append((kind, shown))
        print(
            f"{title:36} {kind:24} {shown or '-':11} {seen} {time.monotonic() - start:.0f} s",
            flush=True,
        )
    differ = [shown for kind, shown in rows if kind != "equal"]
    print(
        f"{len(rows)} causes, {len(differ)} differed, line shown {sum(map(bool, differ))}, of "
        f"these by the watch {sum('watch' in shown for shown in differ)}"
    )


if __name__ == "__main__":
    run()
