"""Processes of a Gloo group, each as a thread of the test."""

from datetime import timedelta
from threading import Thread

from torch import distributed


def run_processes(processes, function, *, closes=False):
    """Call ``function(process, group)`` in one thread for each process; return the results.

    Args:
        processes: Their number.
        function: What each does.
        closes: Whether it closes the group.
    """
    if processes == 1:
        return [function(0, None)]
    gloo = distributed.ProcessGroupGloo
    store = distributed.HashStore()
    results, errors = [None] * processes, []

    def run(process):
        try:
            options = gloo._Options()
            options._devices = [gloo.create_default_device()]
            options._timeout = timedelta(seconds=120)
            group = gloo(store, process, processes, options)
            results[process] = function(process, group)
            if not closes:
                group.barrier().wait()
        except BaseException as error:  # noqa: BLE001 - raised by the test's thread
            errors.append(error)

    threads = [Thread(target=run, args=(process,)) for process in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
