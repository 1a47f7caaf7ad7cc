"""Runs of the driver in processes of their own that are killed on the way: what test_resume.py starts.

Reads a JSON list of runs from standard input: {"config": tree, "resume": bool, "kill": null | [target, n] | seconds}.
`target` is "module:attribute" of a function at whose n-th call the run kills itself; a number is the time after which
it is killed from outside. Prints the list of their exit statuses, negative where a signal ended them. The runs are
forks of this process, which has loaded everything and has no threads yet.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any

import mosaic.train
from mosaic.config import parse_config
from tests.mosaic.small import make_tools, with_rewards


def kill_at(target: str, n: int) -> None:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), 0

    def deadly(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, deadly)


def run(job: dict[str, Any]) -> None:
    mosaic.train.make_tools = make_tools
    mosaic.train.collect = with_rewards(mosaic.train.collect)
    if isinstance(job["kill"], list):
        kill_at(*job["kill"])
    mosaic.train.train(parse_config(job["config"]), resume=job["resume"])


def status_of(job: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(job)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    if isinstance(job["kill"], float):
        time.sleep(job["kill"])
        os.kill(child, signal.SIGKILL)  # a zombie, if it has ended by itself: then nothing happens
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    print(json.dumps([status_of(job) for job in json.load(sys.stdin)]))
