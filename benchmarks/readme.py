"""README's tables of speed, from a report: `python -m benchmarks.readme benchmarks/results/<machine>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import OK
from benchmarks.render import figure, sizes_in_words, table

PEERS = "linear_logprob, peers"


def targets_table(content: dict[str, Any]) -> str:
    """Every target with what was measured, whether it holds or not."""
    lines = [
        [
            f"`{entry['op']}`",
            f"{entry['target']}: {sizes_in_words(_unsaid(entry['sizes']))}",
            figure(entry["measured"]) or entry["verdict"],
            entry["limit"],
            "yes" if entry["verdict"] == "holds" else "no",
        ]
        for entry in content["targets"]
    ]
    return table(["op", "what", "measured", "target", "holds"], lines)


def _unsaid(sizes: dict[str, Any]) -> dict[str, Any]:
    """Those that the target's name does not say."""
    return {name: size for name, size in sizes.items() if name not in ("dtype", "backward", "masked")}


def peers_table(content: dict[str, Any]) -> str:
    """Log-probs of everybody, in products `hidden @ weight.T` of the same dtype (GEMM)."""
    rows = [row for row in content["sections"][PEERS] if row["side"] != "GEMM"]
    cases = dict.fromkeys(row["case"] for row in rows)
    head = {row["case"]: f"{row['problem']}, {row['sizes']['dtype']}" for row in rows}
    ratio = {
        (row["side"], row["case"]): figure(row["ratio"]) if row["status"] == OK else row["status"].partition(":")[0]
        for row in rows
    }
    sides = dict.fromkeys(row["side"] for row in rows)
    return table(
        ["log-probs", *(head[case] for case in cases)],
        [[side, *(ratio[side, case] for case in cases)] for side in sides],
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    content = json.loads(Path(arguments[0]).read_text())
    print(targets_table(content), peers_table(content), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
