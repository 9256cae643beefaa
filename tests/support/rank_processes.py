"""Several processes that train together, as torchrun would start them."""

import json
import os
import subprocess
from pathlib import Path

from forking_python import shared_python

from lightning_d9m.launch.processes import make_rank_variables

_SUPPORT = Path(__file__).parent
_CALL = """
import json, sys, warnings
from scripts import load_script
warnings.filterwarnings("ignore")
path, name, *arguments = sys.argv[1:]
print("\\n" + json.dumps(getattr(load_script(path), name)(*arguments)))
"""


def call_on_ranks(function, count, *arguments, **variables):
    """Call a function of a file of tests on ranks; return what each rank returns, as JSON."""
    words = (_CALL, function.__code__.co_filename, function.__name__, *arguments)
    variables = {"PYTHONPATH": f"{_SUPPORT}:{_SUPPORT.parent}"} | variables
    outputs = run_ranks("-c", count, *words, **variables)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def run_ranks(script, count, *arguments, **variables):
    """Run a script on ranks, which must succeed; return the outputs."""
    statuses, outputs = start_ranks(script, count, *arguments, **variables)
    assert statuses == [0] * count, "\n".join(outputs)
    return outputs


def start_ranks(script, count, *arguments, **variables):
    """Run a script on ranks; return their statuses and outputs."""
    common = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    processes = [
        subprocess.Popen(
            [shared_python(), script, *map(str, arguments)],
            env=common | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in make_rank_variables(count)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
