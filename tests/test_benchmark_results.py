"""The committed results of the benchmarks, and what README says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import readme
from benchmarks.report import RESULTS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_readmes_speed_tables_are_those_of_the_results_it_names():
    (name,) = set(re.findall(r"benchmarks/results/([\w-]+)\.md", README))
    content = json.loads((RESULTS / f"{name}.json").read_text())
    assert not content["run"]["quick"]
    assert readme.targets_table(content) in README
    assert readme.peers_table(content) in README


def test_readmes_tables_from_rows(tmp_path, capsys):
    case = {"case": "a", "problem": "forward", "sizes": {"dtype": "bf16"}}
    rows = [
        {**case, "side": "GEMM", "status": "ok", "ratio": 1.0},
        {**case, "side": "ours", "status": "ok", "ratio": 0.5},
        {**case, "side": "theirs", "status": "not applicable: needs a GPU"},
    ]
    target = {"op": "f", "target": "speed", "sizes": {"tokens": 3, "dtype": "bf16"}, "limit": "<= 2 copies"}
    judged = [{**target, "measured": 2.5, "verdict": "does not hold"}, {**target, "measured": None, "verdict": "late"}]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"targets": judged, "sections": {readme.PEERS: rows}}))
    assert readme.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        "| `f` | speed: T 3 | 2.5 | <= 2 copies | no |",
        "| `f` | speed: T 3 | late | <= 2 copies | no |",
    ]
    assert lines[-2:] == ["| ours | 0.5 |", "| theirs | not applicable |"]
    assert readme.main([]) == 2
