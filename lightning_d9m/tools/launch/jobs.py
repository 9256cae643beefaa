"""Commands that run at once: each in a process of this machine, or in a job of a cluster.

submitit starts the jobs. Its executor ``local`` starts processes in their place, for a trial.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.launch.processes import running_processes, share_cores, tail

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # at a scheduler and at files of other machines
# A file of another machine may appear so much later than its process ends, as submitit knows, too.
_LATE_SECONDS = 60.0
# submitit's own limit of 5 minutes is that of a short function.
_MINUTES = 60
# In a job of Slurm, Lightning would take the one task for the one process of the training.
_WITHOUT = [word for name in ("NTASKS", "NTASKS_PER_NODE") for word in ("-u", f"SLURM_{name}")]
_TASKS = ("nodes", "ntasks", "tasks_per_node", "ntasks_per_node")
# Says whether a command has ended.
_HasEnded = Callable[[], bool]


def run_jobs(
    commands: Mapping[int, Sequence[str]],
    folder: Path,
    note: Callable[[int, str], None],
    *,
    has_result: Callable[[int], bool] = lambda _: True,
    at_once: int = 1,
    submit: str | None = None,
) -> None:
    """Run commands, and call ``note`` with the number and the end of the log of each that ends.

    A signal to this process ends all of them, also those on a cluster, see ``running_processes``.

    Args:
        commands: The commands by number.
        folder: Where the logs go.
        note: What is called.
        has_result: Whether the result of a command is there; a job ends a minute after its result
            or its state says so, if the other does not.
        at_once: How many run at once; of jobs, the scheduler decides.
        submit: The name that submitit has for a cluster, and parameters of its ``AutoExecutor``,
            such as ``"slurm,slurm_partition=gpu,gpus_per_node=1"``; None for processes.

    Raises:
        SettingError: If submitit is not installed, or does not take what is given.
        CommandError: If a process does not start.
    """
    waiting, running = dict(commands), dict[int, tuple[_HasEnded, Path]]()
    ended = dict[int, float]()
    with running_processes() as tree, ExitStack() as submitted:
        start = None if submit is None else _open_cluster(submit, folder / "jobs", submitted)

        def is_over(number: int) -> bool:
            if start is None:
                return running[number][0]()
            # A scheduler may not know the state of a job, and its result may come late.
            found, now = (has_result(number), running[number][0]()), time.monotonic()
            if any(found):
                ended.setdefault(number, now)
            else:  # it was begun again
                ended.pop(number, None)
            is_late = bool(tree.received) or now - ended.get(number, now) > _LATE_SECONDS
            return all(found) or (any(found) and is_late)

        def note_ended() -> None:
            for number in [*filter(is_over, running)]:
                log = running.pop(number)[1]
                note(number, f"Log: {log}.{tail(log)}" if log.exists() else f"Log: {log}.")

        while (waiting or running) and not tree.received:
            while waiting and not tree.received and (start or len(running) < at_once):
                number = next(iter(waiting))
                words, log = waiting.pop(number), folder / f"job-{number:03d}.log"
                if start is not None:
                    running[number] = start(words)
                else:
                    job = tree.start(words, None, log, {**os.environ, **share_cores()})
                    running[number] = partial(_is_over, job), log
            note_ended()
            time.sleep(_POLL_SECONDS if submit is None else _LOOK_SECONDS)
        note_ended()  # what has ended at the moment of a signal


def _is_over(job: "subprocess.Popen[bytes]") -> bool:
    return job.poll() is not None


def _open_cluster(
    chosen: str, folder: Path, submitted: ExitStack
) -> Callable[[Sequence[str]], tuple[_HasEnded, Path]]:
    """Return a function that submits a command; jobs that still run when a stack ends are canceled.

    Raises:
        SettingError: As ``run_jobs``.
    """
    try:
        import submitit
    except ImportError as error:
        raise SettingError(
            "Jobs are submitted by submitit, which is not installed. Install "
            "'lightning-d9m[slurm]', or print the commands with --print-commands."
        ) from error

    def ask(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # submitit raises NameError, AssertionError, FailedJobError
            said = str(error).partition("\n")[0].rstrip(".?")
            raise SettingError(
                f"submitit does not take {chosen!r}: {said}. Give local, or slurm and its "
                "parameters: slurm,slurm_partition=NAME,gpus_per_node=1,timeout_min=600."
            ) from error

    def make() -> Any:
        cluster, *words = chosen.split(",")
        given = dict(word.partition("=")[::2] for word in words)
        values = {name: int(text) if text.isdigit() else text for name, text in given.items()}
        # Its executor "debug" would run the command in this process. Several tasks would each run
        # it; a training on one node starts its processes itself.
        names = {name.removeprefix("slurm_") for name in values}
        if cluster not in ("local", "slurm") or not names.isdisjoint(_TASKS):
            raise ValueError("the cluster is local or slurm, and a job has one task")
        executor = submitit.AutoExecutor(folder, cluster=cluster)
        executor.update_parameters(**{"timeout_min": _MINUTES, **values})
        return executor

    executor = ask(make)

    def submit(words: Sequence[str]) -> tuple[_HasEnded, Path]:
        # Its result is in files of the command: submitit's own would be read as a pickle.
        command = submitit.helpers.CommandFunction(["env", *_WITHOUT, *words])
        job = ask(partial(executor.submit, command))
        submitted.callback(lambda: None if job.done() else job.cancel(check=False))
        # A job that is killed where Slurm keeps no accounts is waited for: nothing tells its end.
        said = "stop it by `scancel` and the check by Ctrl-C if its log does not grow"
        print(f"job {job.job_id}: {job.paths.stderr}; {said}", file=sys.stderr, flush=True)
        return job.done, Path(job.paths.stderr)

    return submit
