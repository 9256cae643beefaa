"""Seeds: none, fixed, and taken from the clock."""

import os
import random
import secrets
import time
import uuid
from datetime import datetime
from random import Random

import numpy as np
import numpy.random as npr
import torch
from numpy.random import RandomState, default_rng

CONFIG = {"seed": 3}
SEED = 42

unseeded = default_rng()  # expect: D9M201
nothing = np.random.default_rng(None)  # expect: D9M201
legacy = RandomState()  # expect: D9M201
python = Random()  # expect: D9M201
sequence = np.random.SeedSequence()  # expect: D9M201
seeded = default_rng(0)  # fine
configured = np.random.default_rng(CONFIG["seed"])  # fine
named = npr.default_rng(seed=SEED)  # fine
fixed = RandomState(SEED)  # fine
twister = random.Random(7)  # fine

random.seed(0)  # fine
random.seed()  # expect: D9M204
np.random.seed(None)  # expect: D9M204
np.random.seed(SEED)  # fine
torch.manual_seed(SEED)  # fine
torch.seed()  # expect: D9M204
torch.cuda.manual_seed_all(SEED)  # fine
torch.manual_seed(int(time.time()))  # expect: D9M203
np.random.seed(int.from_bytes(os.urandom(4), "little"))  # expect: D9M203
random.seed(uuid.uuid4().int)  # expect: D9M203
clock = int(datetime.now().timestamp())
torch.manual_seed(clock)  # expect: D9M203
by_process = np.random.default_rng(os.getpid())  # expect: D9M203
started = time.time()  # fine
run_name = uuid.uuid4().hex  # fine
token = os.urandom(8)  # fine
augment = random.SystemRandom()  # expect: D9M206
lucky = secrets.choice([1, 2, 3])  # expect: D9M206

def fit(model, seed=None):
    return model.fit(random_state=int(time.time()))  # expect: D9M203


def fit_fixed(model, seed=None):
    return model.fit(random_state=seed)  # fine


class Shuffler:
    def __init__(self):
        self.later = random.Random()  # fine
        self.never = random.Random()  # expect: D9M201

    def start(self, seed):
        self.later.seed(seed)  # fine
