"""Checkpoints that are there whole or not at all, and the random state that a resumed run needs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch

from mosaic.log import atomic_write, sync

_NAME = re.compile(r"step_(\d{6})")


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same in every process and on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seeds Python's, NumPy's and torch's global streams from named parts."""
    seed = derive_seed(*parts)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_checkpoint(folder: Path, step: int, *, model, tokenizer, optimizer, schedule, keep: int) -> Path:
    """Writes `folder`/step_NNNNNN: policy/ (safetensors, loadable by Hugging Face), optimizer.pt and state.json.

    Everything goes to a temporary folder, is flushed to disk and appears by one rename; then all but the newest
    `keep` checkpoints are removed.
    """
    target = folder / f"step_{step:06d}"
    staging = folder / f".{target.name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    model.save_pretrained(staging / "policy")
    tokenizer.save_pretrained(staging / "policy")
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, staging / "optimizer.pt")
    atomic_write(staging / "state.json", json.dumps({"step": step, "random": _random_state()}))
    for path in [*staging.rglob("*"), staging]:
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(staging, target)
    sync(folder)
    discard_leftovers(folder, keep)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; leftovers of a killed save are not among them."""
    return sorted(path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))


def discard_leftovers(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and what a killed save left behind."""
    for path in [*folder.glob(".step_*"), *list_checkpoints(folder)[:-keep]]:
        shutil.rmtree(path, ignore_errors=True)


def restore_training(checkpoint: Path, *, optimizer, schedule) -> int:
    """Puts optimizer, schedule and random state back; returns the step after which the checkpoint was written."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    # The run's steps may have grown, and a decay with them: the next rate need not be the one that was saved.
    for group, lr, scale in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = lr * scale(schedule.last_epoch)
    state = json.loads((checkpoint / "state.json").read_text())
    _restore_random(state["random"])
    return state["step"]


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
    }


def _restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
